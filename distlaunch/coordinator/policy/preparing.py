"""What the nodes of an attempt settle before its workers start: a port, and where they meet. Pure.

Rank 0's node holds the port and listens on it; every other node connects to it, at all addresses that may be the
right one. So the address that workers get is one that has worked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from distlaunch.coordinator.policy.cast import Cast
from distlaunch.coordinator.policy.events_and_actions import Action, ToNode
from distlaunch.coordinator.policy.job_settings import Gathering
from distlaunch.coordinator.policy.node_setup import Refusal
from distlaunch.core.errors import EXIT_UNAVAILABLE, LaunchError
from distlaunch.core.model.host_list import name_hosts
from distlaunch.core.model.text import counted
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol.remote import Reach, Reached, Surveyed
from distlaunch.planning.master_address import Meeting

REACH_S = 5.0
"""How long nodes may take to connect to the master's."""
PREPARE_S = 60.0
"""How long they may take to prepare: the memory of GPUs is waited for, up to 30 s."""
SLACK_S = 5.0


class Preparation:
    """One attempt's way from its plan to its start."""

    def __init__(self, gathering: Gathering, cast: Cast, attempt: int, surveys: Sequence[Surveyed], now: float) -> None:
        self._gathering = gathering
        self._cast = cast
        self._attempt = attempt
        self._surveys = surveys
        self._token = gathering.token(attempt) if len(cast.members) > 1 else ""
        self._reached: dict[int, Reached] = {}
        self._until = now + PREPARE_S
        self.reaches = False
        """All have prepared, and try to reach the master's node."""

    def begin(self, port: int, *, worker_ports: int) -> list[Action]:
        """Have all prepare; ``worker_ports``: how many each node is to hold for every worker of its own."""
        first, cast = self._cast.members[0], self._cast
        return [
            ToNode(
                node=member,
                message=m.Prepare(
                    attempt=self._attempt,
                    port=port if member == first else None,
                    token=self._token if member == first else "",
                    ports=worker_ports * len(cast.ranks(member)),
                ),
            )
            for member in cast.members
        ]

    def deadline(self) -> float:
        """Give when those that owe an answer are late."""
        return self._until

    def reach(self, port: int, now: float) -> list[Action] | Refusal:
        """Have the others try to reach the master's node."""
        cast = self._cast
        self.reaches = True
        self._until = now + REACH_S + SLACK_S
        try:
            addresses = self._gathering.addresses(self._surveys[0], cast.hosts[0])
        except LaunchError as exc:
            return Refusal.of(exc)
        question = Reach(attempt=self._attempt, addresses=addresses, port=port, token=self._token, bound_s=REACH_S)
        return [ToNode(node=member, message=question) for member in cast.members[1:]]

    def reached(self, member: int, message: Reached) -> None:
        """Take in how a node fared."""
        self._reached[self._cast.node_ranks[member]] = message

    def late(self, owing: Iterable[int]) -> Refusal | None:
        """Take in that nodes have not answered in time: where they were to reach the master, they have not."""
        if self.reaches:
            problem = f"no answer within {REACH_S + SLACK_S:g} s"
            for member in owing:
                self.reached(member, Reached(attempt=self._attempt, routes=(), problem=problem))
            return None
        late = sorted(owing)
        text = f"error: {counted(len(late), 'node')} did not prepare within {PREPARE_S:g} s: "
        return Refusal(exit_code=EXIT_UNAVAILABLE, text=text + name_hosts(map(self._cast.host, late)))

    def astray(self, may_leave: Callable[[int], bool]) -> list[tuple[int, str]]:
        """Give the members that have no way to the master's node, and why, if the job can do without them."""
        lost = [
            (self._cast.members[rank], answer.problem or "it has no way to rank 0's node")
            for rank, answer in self._reached.items()
            if not answer.routes
        ]
        return lost if len(lost) < len(self._reached) and may_leave(len(lost)) else []

    def meet(self) -> Meeting | Refusal:
        """Settle where workers meet, once all have tried."""
        try:
            return self._gathering.meet(self._surveys, self._reached)
        except LaunchError as exc:
            return Refusal.of(exc)
