"""The nodes that a job may use, one by one: reached, lost, reached again. Pure.

A node that is lost again and again is left alone for a while (``LOSSES`` within ``LOSSES_S``), the longer the more
often that happens; it is never given up: it may only have been slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from distlaunch.coordinator.policy.events_and_actions import Action, Connect, Disconnect, Entry, LossKind, Say
from distlaunch.core.model.text import counted, printable
from distlaunch.core.protocol.remote import Surveyed
from distlaunch.transport.failures import ConnectFailure

RETRY_S, RETRY_MOST_S = 0.5, 5.0
"""While a job waits for a node, it is tried again after so long, twice that, and so on."""
BACK_S, BACK_MOST_S = 5.0, 60.0
"""So it is while the job goes on without it."""
UNUSABLE_S, UNUSABLE_MOST_S = 60.0, 600.0
"""And so if what keeps it out will not mend itself."""
LOSSES, LOSSES_S = 3, 600.0
COOLING_S, COOLING_MOST_S = 60.0, 3600.0
AFTER_S = 1.0
"""A lost agent's workers may take the failure grace to end; its node is not used again before that and so long."""
_LONGEST = 2000


class Member:
    """One node, by its number in the list of hosts that the job was given; that never changes."""

    __slots__ = (
        "coolings", "cools_until", "failure", "free_at", "host", "kind_lost", "logged_in", "losses", "number",
        "present", "serial", "state", "surveyed", "tries", "why_lost",
    )  # fmt: skip

    def __init__(self, number: int, host: str) -> None:
        self.number = number
        self.host = host
        self.state: Literal["new", "connecting", "joined", "lost"] = "new"
        """``lost``: it was joined, and nobody tries to reach it."""
        self.present = True
        """The source of hosts still names it."""
        self.failure: ConnectFailure | None = None
        """Why it cannot take part, as far as is known."""
        self.serial = 0
        """Of the survey whose answer it owes; 0: none."""
        self.surveyed: Surveyed | None = None
        self.tries = 0
        """Attempts to reach it that have failed since it was last reached."""
        self.why_lost: str | None = None
        """Set until it is reached again."""
        self.kind_lost = LossKind.GONE
        self.logged_in = False
        """It is being connected to, and the login has succeeded."""
        self.free_at = 0.0
        """When what ran there before it was lost has ended."""
        self.losses: list[float] = []
        self.coolings = 0
        self.cools_until = 0.0


class Membership:
    """All of them. ``flexible``: the job goes on without those that are lost, which are tried again meanwhile."""

    def __init__(self, hosts: Sequence[str], *, flexible: bool, failure_grace_s: float) -> None:
        self.members = [Member(number, host) for number, host in enumerate(hosts)]
        self._flexible = flexible
        self._after_s = failure_grace_s + AFTER_S

    def __getitem__(self, number: int) -> Member:
        return self.members[number]

    def present(self) -> list[Member]:
        """Give those that the source of hosts names."""
        return [member for member in self.members if member.present]

    # --- reaching them

    def connect(self, member: Member, now: float, *, delay_s: float = 0.0) -> Action:
        """Reach one, as soon as it can be used again."""
        member.state = "connecting"
        member.logged_in = False
        return Connect(node=member.number, delay_s=round(max(delay_s, member.free_at - now, 0.0), 3))

    def connect_again(self, member: Member, now: float, *, needed: bool) -> Action:
        """Reach one that has not been reached, after a while; ``needed``: the job waits for it."""
        tries = member.tries
        if member.failure is not None and not member.failure.passing:
            delay_s = _doubled(UNUSABLE_S, tries - 1, UNUSABLE_MOST_S)
        elif needed:
            delay_s = _doubled(RETRY_S, tries - 1, RETRY_MOST_S)
        else:
            delay_s = _doubled(BACK_S, tries, BACK_MOST_S)
        return self.connect(member, now, delay_s=max(delay_s, member.cools_until - now))

    def joined(self, member: Member) -> list[Action]:
        """Take in that an agent has come up."""
        back = member.why_lost is not None
        member.state, member.failure, member.why_lost, member.tries = "joined", None, None, 0
        member.serial, member.surveyed = 0, None
        fields = {"node": member.number, "host": member.host, "again": back}
        return [Entry(type="node_joined", fields=fields)]

    def unreachable(self, member: Member, failure: ConnectFailure) -> list[Action]:
        """Take in that it was not reached; recorded unless it fails as it did before."""
        told = member.failure is not None and (member.failure.step, member.failure.text) == (failure.step, failure.text)
        member.tries += 1
        member.failure = failure
        fields = {
            "node": member.number,
            "host": member.host,
            "address": failure.address,
            "step": failure.step,
            "text": failure.text,
            "passing": failure.passing,
        }
        return [] if told else [Entry(type="node_unreachable", fields=fields)]

    # --- losing them

    def lost(self, member: Member, why: str, now: float, kind: LossKind = LossKind.GONE) -> list[Action]:
        """Take in that it is gone. Where the job goes on without it, it is tried again meanwhile."""
        member.state, member.serial, member.surveyed, member.tries = "lost", 0, None, 0
        member.why_lost, member.kind_lost, member.failure = why, kind, None
        member.free_at = now + self._after_s
        if not self._flexible:
            return []
        actions = self._count_loss(member, now)
        return [*actions, self.connect_again(member, now, needed=False)]

    def _count_loss(self, member: Member, now: float) -> list[Action]:
        recent = [time for time in member.losses if now - time < LOSSES_S]
        if not recent:
            member.coolings = 0
        member.losses = [*recent[-LOSSES:], now]
        if len(member.losses) < LOSSES:
            return []
        cooling_s = _doubled(COOLING_S, member.coolings, COOLING_MOST_S)
        member.coolings += 1
        member.cools_until = now + cooling_s
        times = counted(len(member.losses), "time")
        text = f"node {member.host} was lost {times} within {LOSSES_S / 60:g} min: not used for {cooling_s:g} s"
        return [Say(text=text, level="warning")]

    # --- --discover

    def discovered(self, hosts: Iterable[str]) -> tuple[list[Member], list[Member]]:
        """Take in which hosts there are; give those that have come (perhaps again), and those that have gone."""
        named = dict.fromkeys(hosts)
        come: list[Member] = []
        gone: list[Member] = []
        for member in self.members:
            if (there := member.host in named) != member.present:
                member.present = there
                (come if there else gone).append(member)
        known = {member.host for member in self.members}
        for host in named:
            if host not in known:
                come.append(Member(len(self.members), host))
                self.members.append(come[-1])
        return come, gone

    @staticmethod
    def leave(member: Member) -> list[Action]:
        """Let go of one that takes no part any more."""
        if member.state in ("new", "lost"):
            return []
        member.state, member.serial, member.surveyed, member.failure = "new", 0, None, None
        member.why_lost, member.tries = None, 0
        return [Disconnect(node=member.number)]


def _doubled(first_s: float, times: int, most_s: float) -> float:
    return min(first_s * 2.0 ** min(max(times, 0), 30), most_s)


def shown(text: str) -> str:
    """Put what a node says into a line of ours, of which it may not make anything else."""
    return printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...", keep="\n")
