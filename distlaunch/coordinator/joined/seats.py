"""The seats of a job's launchers: who has one, whether it is still there, and whether it is late.

No clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.coordinator.policy.membership import shown
from distlaunch.coordinator.runtime.message_checks import Part
from distlaunch.coordinator.runtime.peers import Peer
from distlaunch.coordinator.runtime.start_bound import StartBound
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.transport.failures import ConnectFailure

PROBE_S = 3.0
"""If another launcher calls for a seat, the one that has it gets so long to answer a ping."""
_OLD_S = 15.0
"""Whoever called for a seat does so again sooner than this, or not at all."""


class Seat:
    """What is known of one member. Times are on the job's clock."""

    __slots__ = (
        "_probed_at", "apply", "attempt", "host", "instance", "joined", "part", "peer", "refused", "start", "wanted_at",
    )  # fmt: skip

    def __init__(self) -> None:
        self.host = ""
        self.instance = ""
        self.wanted_at: float | None = None
        """From when on the policy wants to hear of it; None: it has not asked, or has heard."""
        self.joined = False
        self.start = StartBound()
        self.have(None)

    def have(self, peer: Peer[p.FromPeer] | None) -> None:
        """Have the link of a launcher that has called, and has not said anything so far."""
        self.peer = peer
        self.apply: p.Apply | None = None
        self.refused = False
        """It cannot take part: nothing that it says matters."""
        self.part = Part(0)
        """What its launcher may say of attempts; output stays with it."""
        self.start.end()
        self.attempt = -1
        """The newest that it was told to start; -1: none."""
        self._probed_at: float | None = None

    def leave(self) -> None:
        """Have no launcher any more; what it has said of itself is kept until the next one comes."""
        self.peer = None
        self.start.end()

    def came_in_vain(self, number: int, what: str, why: str) -> a.Unreachable:
        """Say why a launcher that has called does not take part; ``what`` a number is called."""
        failure = ConnectFailure(host=f"{what} {number} ({self.host})", step="call", text=shown(why))
        return a.Unreachable(node=number, failure=failure)

    def probe(self, peer: Peer[p.FromPeer], now: float) -> Literal["ask", "wait", "there", "gone"]:
        """Tell how it stands with its launcher, now that another has called for the seat: ``ask`` it first."""
        asked = self._probed_at
        if asked is None or now - asked > _OLD_S:
            self._probed_at = now
            return "ask"
        if peer.heard > asked:
            self._probed_at = None  # an answer tells nothing of later: who calls then is to find out anew
            return "there"
        return "gone" if now - asked >= PROBE_S else "wait"

    def commence(self, attempt: int, workers: int, now: float) -> None:
        """Take in that its launcher is told to start so many workers."""
        self.attempt = attempt
        self.start.begin(workers, now)


def number_of(call: p.Call, seats: Sequence[Seat], let_in: Mapping[str, int]) -> int | None:
    """Give a launcher that has no rank the seat that it had, or one of its host that is free, or the next.

    ``let_in``: the seats of those whose links are yet to come, by instance.
    """
    others = list(enumerate(seats))[1:]
    known = [number for number, seat in others if seat.instance == call.instance]
    free = [number for number, seat in others if seat.peer is None and seat.instance not in let_in]
    same = [number for number in free if seats[number].host == call.host]
    fresh = [number for number in free if not seats[number].host]
    return next(iter((*known, *same, *fresh, *free)), None)
