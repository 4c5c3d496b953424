"""Record the state of each node that a job may use, its losses, and why it cannot be used. No I/O.

A node that is lost ``LOSSES`` times within ``LOSSES_S`` is not used for some time, which doubles
with each further loss. It may only have been slow, so it is never excluded for good.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from distlaunch.coordinator.policy.events_and_actions import (
    Action,
    Connect,
    Disconnect,
    JobError,
    LossKind,
    RecordEvent,
    ShowMessage,
)
from distlaunch.coordinator.policy.job_settings import NodeSetupSettings
from distlaunch.core.errors import EXIT_UNAVAILABLE
from distlaunch.core.model.host_list import fold_hosts, name_hosts
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import counted, format_ranks, printable
from distlaunch.core.protocol.agent_messages import Survey, Surveyed
from distlaunch.transport.connect_errors import STARTUP_HINT, ConnectFailure, Step
from distlaunch.transport.unreachable import render

RETRY_S, RETRY_MOST_S = 0.5, 5.0
"""First and longest delay before the job connects again to a node for which it waits. The delay
doubles."""
BACK_S, BACK_MOST_S = 5.0, 60.0
"""First and longest delay before the job connects again to a node without which it runs."""
UNUSABLE_S, UNUSABLE_MOST_S = 60.0, 600.0
"""First and longest delay before the job connects again to a node with a permanent failure."""
LOSSES, LOSSES_S = 3, 600.0
COOLING_S, COOLING_MOST_S = 60.0, 3600.0
AFTER_S = 1.0
"""Delay before a lost node is used again, after the failure grace in which its workers end."""
_LONGEST = 2000
_LONGEST_HOSTS = 400
"""Largest number of characters of a list of hosts in a hint."""
_LOOKS_LIKE_HOST = re.compile(r"[\w.-]+:\d+(?:,[\w.,:-]*)?")


class JobNode:
    """One node. Its number is its index in the job's list of hosts and never changes."""

    __slots__ = (
        "coolings",
        "cools_until",
        "failure",
        "free_at",
        "host",
        "kind_lost",
        "logged_in",
        "losses",
        "number",
        "present",
        "serial",
        "state",
        "surveyed",
        "tries",
        "why_lost",
    )

    def __init__(self, number: int, host: str) -> None:
        self.number = number
        self.host = host
        self.state: Literal["new", "connecting", "joined", "lost"] = "new"
        """``lost``: the node was connected, and is not being connected again."""
        self.present = True
        """Whether the source of hosts still lists the node."""
        self.failure: ConnectFailure | None = None
        """Why the node cannot take part, if known."""
        self.serial = 0
        """The serial number of the survey that the node has not answered; 0: none."""
        self.surveyed: Surveyed | None = None
        self.tries = 0
        """How often connecting has failed since the last connection."""
        self.why_lost: str | None = None
        """Why the node was lost, unless it is connected again."""
        self.kind_lost = LossKind.GONE
        self.logged_in = False
        """The login has succeeded while the node is being connected."""
        self.free_at = 0.0
        """When the workers that ran on the node before its loss have ended."""
        self.losses: list[float] = []
        self.coolings = 0
        self.cools_until = 0.0


class JobNodes:
    """All nodes of a job. ``flexible``: the job continues without lost nodes, which are tried
    again."""

    def __init__(self, hosts: Sequence[str], *, flexible: bool, failure_grace_s: float) -> None:
        self.all_nodes = [JobNode(number, host) for number, host in enumerate(hosts)]
        self._flexible = flexible
        self._after_s = failure_grace_s + AFTER_S

    def __getitem__(self, number: int) -> JobNode:
        return self.all_nodes[number]

    def present(self) -> list[JobNode]:
        """Return the nodes that the source of hosts names."""
        return [node for node in self.all_nodes if node.present]

    # --- reaching them

    def connect(self, node: JobNode, now: float, *, delay_s: float = 0.0) -> Action:
        """Return the action that connects to a node as soon as it may be used again."""
        node.state = "connecting"
        node.logged_in = False
        return Connect(node=node.number, delay_s=round(max(delay_s, node.free_at - now, 0.0), 3))

    def connect_again(self, node: JobNode, now: float, *, needed: bool) -> Action:
        """Return the action that connects again, after a delay, to a node that could not be
        reached.

        ``needed``: the job waits for it.
        """
        tries = node.tries
        if node.failure is not None and not node.failure.passing:
            delay_s = _doubled(UNUSABLE_S, tries - 1, UNUSABLE_MOST_S)
        elif needed:
            delay_s = _doubled(RETRY_S, tries - 1, RETRY_MOST_S)
        else:
            delay_s = _doubled(BACK_S, tries, BACK_MOST_S)
        return self.connect(node, now, delay_s=max(delay_s, node.cools_until - now))

    def joined(self, node: JobNode) -> list[Action]:
        """Record that the agent of a node has connected. Return the entry for the job's record."""
        back = node.why_lost is not None
        node.state, node.failure, node.why_lost, node.tries = "joined", None, None, 0
        node.serial, node.surveyed = 0, None
        fields = {"node": node.number, "host": node.host, "again": back}
        return [RecordEvent(type="node_joined", fields=fields)]

    def unreachable(self, node: JobNode, failure: ConnectFailure) -> list[Action]:
        """Record that a node could not be reached. Return an event, unless the failure is the
        previous one."""
        is_known = node.failure is not None and (node.failure.step, node.failure.text) == (
            failure.step,
            failure.text,
        )
        node.tries += 1
        node.failure = failure
        fields = {
            "node": node.number,
            "host": node.host,
            "address": failure.address,
            "step": failure.step,
            "text": failure.text,
            "passing": failure.passing,
        }
        return [] if is_known else [RecordEvent(type="node_unreachable", fields=fields)]

    # --- losing them

    def lost(
        self, node: JobNode, why: str, now: float, kind: LossKind = LossKind.GONE
    ) -> list[Action]:
        """Record a lost node. Return the actions that follow.

        If the job may continue on fewer nodes, they include a new connection, so that the node can
        rejoin.
        """
        node.state, node.serial, node.surveyed, node.tries = "lost", 0, None, 0
        node.why_lost, node.kind_lost, node.failure = why, kind, None
        node.free_at = now + self._after_s
        if not self._flexible:
            return []
        actions = self._count_loss(node, now)
        return [*actions, self.connect_again(node, now, needed=False)]

    def _count_loss(self, node: JobNode, now: float) -> list[Action]:
        recent = [time for time in node.losses if now - time < LOSSES_S]
        if not recent:
            node.coolings = 0
        node.losses = [*recent[-LOSSES:], now]
        if len(node.losses) < LOSSES:
            return []
        cooling_s = _doubled(COOLING_S, node.coolings, COOLING_MOST_S)
        node.coolings += 1
        node.cools_until = now + cooling_s
        times = counted(len(node.losses), "time")
        text = (
            f"node {node.host} was lost {times} within {LOSSES_S / 60:g} min: not used for "
            f"{cooling_s:g} s"
        )
        return [ShowMessage(text=text, level="warning")]

    # --- --discover

    def discovered(self, hosts: Iterable[str]) -> tuple[list[JobNode], list[JobNode]]:
        """Record the hosts that exist now.

        Return the nodes that are new or have returned, and those that no longer exist.
        """
        named = dict.fromkeys(hosts)
        come: list[JobNode] = []
        gone: list[JobNode] = []
        for node in self.all_nodes:
            if (there := node.host in named) != node.present:
                node.present = there
                (come if there else gone).append(node)
        known = {node.host for node in self.all_nodes}
        for host in named:
            if host not in known:
                come.append(JobNode(len(self.all_nodes), host))
                self.all_nodes.append(come[-1])
        return come, gone

    @staticmethod
    def leave(node: JobNode) -> list[Action]:
        """Reset the record of a node that no longer takes part. Return the actions that disconnect
        it; none if it is not connected."""
        if node.state in ("new", "lost"):
            return []
        node.state, node.serial, node.surveyed, node.failure = "new", 0, None, None
        node.why_lost, node.tries = None, 0
        return [Disconnect(node=node.number)]


def _doubled(first_s: float, times: int, most_s: float) -> float:
    """Return ``first_s``, doubled ``times`` times, but at most ``most_s``."""
    return min(first_s * 2.0 ** min(max(times, 0), 30), most_s)


def printable_short(text: str) -> str:
    """Return ``text`` from a node, shortened and without control characters other than newlines."""
    return printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...", keep="\n")


def _hint_of_part(part: Step) -> str | None:
    match part:
        case "directory":
            return f"the working directory must be there on every node: {Opt.WORKDIR} names another"
        case "python":
            return f"{Opt.PYTHON} names the workers' interpreter on the nodes"
        case _:
            return None


def obstacle(host: str, question: Survey, answer: Surveyed) -> ConnectFailure | None:
    """Return why workers cannot run on a surveyed node, if so."""
    hint = None
    if not answer.cpus.allowed:
        step: Step = "agent"
        text = "it names no CPU that it may use"
    elif answer.problem is not None:
        step, text = answer.problem_part, printable_short(answer.problem)
        hint = answer.hint or _hint_of_part(step)
    elif question.pythons and not question.program and answer.python is None:
        step = "python"
        text = f"none of the workers' interpreters is there: {', '.join(question.pythons)}"
        hint = f"{Opt.PYTHON} names one"
    elif question.script and answer.script_sha256 is None:
        step = "script"
        text = f"there is no {question.script} (working directory: {question.workdir})"
        hint = (
            "is the name right? copy it there, or keep it on a file system that all nodes "
            f"share; {Opt.WORKDIR} names the directory"
        )
        if _LOOKS_LIKE_HOST.fullmatch(question.script):
            hint = f"if {question.script} is a host: commas, and no spaces, separate hosts"
    else:
        return None
    return ConnectFailure(host=host, step=step, text=text, hint=hint, passing=False)


def same_machine(nodes: Sequence[JobNode]) -> tuple[JobNode, JobNode] | None:
    """Return the first two of these nodes that are the same machine, if any."""
    by_machine: dict[str, JobNode] = {}
    for node in nodes:
        machine = "" if node.surveyed is None else node.surveyed.machine
        first = by_machine.setdefault(machine, node) if machine else node
        if first is not node:
            return first, node
    return None


def why_not(node: JobNode, *, waited_s: float, calls: bool = False) -> ConnectFailure:
    """Return why a node is missing in an attempt that cannot start.

    ``calls``: the node's own launcher connects to the coordinator.
    """
    if node.why_lost is not None and node.kind_lost is LossKind.ODD:
        # A later attempt to connect may fail for another reason, which explains nothing.
        return ConnectFailure(host=node.host, step="agent", text=node.why_lost, passing=False)
    if node.failure is not None:
        return node.failure
    if node.why_lost is not None:
        return ConnectFailure(
            host=node.host, step="connect", text=f"lost ({node.why_lost}), and not back"
        )
    if node.logged_in:
        text = f"logged in, but the agent has not started within {waited_s:g} s"
        return ConnectFailure(host=node.host, step="agent", text=text, hint=STARTUP_HINT)
    if node.state == "joined":
        return ConnectFailure(
            host=node.host, step="agent", text=f"no answer to the survey within {waited_s:g} s"
        )
    if calls:
        return ConnectFailure(
            host=node.host, step="call", text=f"its launcher has not called within {waited_s:g} s"
        )
    return ConnectFailure(host=node.host, step="connect", text=f"not reached within {waited_s:g} s")


def too_few(
    settings: NodeSetupSettings,
    inside: Sequence[JobNode],
    missing: Sequence[JobNode],
    *,
    present: int,
) -> JobError:
    """Return the error that the job has too few nodes, with a row for each missing one."""
    if settings.flexible:
        there = "is" if len(inside) == 1 else "are"
        few = f"{len(inside)} of at least {counted(settings.bounds[0], 'node')} {there} there"
    else:
        few = f"{len(missing)} of {counted(present, 'node')} cannot be used"
    if settings.launchers and inside:
        few += f"; there: {_launchers(inside)}"
    failures = [
        why_not(node, waited_s=settings.join_timeout_s, calls=settings.launchers)
        for node in missing
    ]
    alone = "" if settings.flexible else settings.alone
    instead = (
        without(failures) if inside and not settings.flexible and not settings.launchers else ""
    )
    return JobError(
        exit_code=EXIT_UNAVAILABLE,
        message=few,
        table=render(failures),
        hints=tuple(filter(None, (instead, alone))),
    )


def _launchers(nodes: Sequence[JobNode]) -> str:
    """Return the hosts of launchers, with numbers if several are on one host."""
    hosts = dict.fromkeys(node.host for node in nodes)
    if len(hosts) == len(nodes):
        return name_hosts(hosts)
    return f"launchers {format_ranks(node.number for node in nodes)} on {name_hosts(hosts)}"


def without(failures: Sequence[ConnectFailure]) -> str:
    """Return a hint how to run the job without the unreachable hosts; "" if a host was reached but
    cannot be used."""
    if not all(failure.step in ("resolve", "connect", "login", "host key") for failure in failures):
        return ""
    hosts, more = _listed([*dict.fromkeys(failure.host for failure in failures)])
    others = f" and {more} more of them" if more else ""
    return (
        f"{Opt.EXCLUDE} {hosts}{others} goes on without;"
        f" with {Opt.NUM_NODES} MIN:MAX a job takes those that are there"
    )


def _listed(hosts: Sequence[str]) -> tuple[str, int]:
    """Return the hosts folded to one argument, and the number of hosts that did not fit."""
    names = [f"[{host}]" if ":" in host else host for host in hosts]
    count = len(names)
    while len(text := fold_hosts(names[:count])) > _LONGEST_HOSTS and count > 1:
        count = count * 3 // 4
    return (f"'{text}'" if "[" in text else text), len(names) - count


def waiting(
    missing: Sequence[JobNode],
    *,
    here: int,
    present: int,
    within_s: float | None,
    left: str | None,
    launchers: bool = False,
) -> list[Action]:
    """Return the notice with the nodes for which the job waits, and the known reasons.

    ``here`` of ``present`` nodes are connected; the wait ends after ``within_s`` seconds. ``left``:
    nodes that have just left. ``launchers``: the notice is a warning, so that the other launchers
    show it.
    """
    text = f"{here} of {counted(present, 'node')} {'is' if here == 1 else 'are'} here; waiting "
    text += "" if within_s is None else f"up to {within_s:.0f} s more "
    text += f"for {name_hosts(node.host for node in missing)}"
    failure = next((node.failure for node in missing if node.failure is not None), None)
    started = next((node for node in missing if node.logged_in), None)
    if failure is None and started is not None:
        text += f" ({started.host}: logged in, the agent has not started)"
    text += (
        f" ({failure.host}: {failure.step}: {printable_short(failure.text)})"
        if failure is not None
        else ""
    )
    text = f"{left}; {text}" if left else text
    return [ShowMessage(text=text, level="warning" if left or launchers else "info")]
