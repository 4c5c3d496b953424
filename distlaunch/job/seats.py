"""Layer job: the seats of a job's launchers: who has one, whether it is still there, and whether it is late. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from distlaunch.core.wire import messages as m
from distlaunch.core.wire import peers as p
from distlaunch.job.parts import Part
from distlaunch.job.peers import Peer

PROBE_S = 3.0
"""If another launcher calls for a seat, the one that has it gets so long to answer a ping."""
START_S = 60.0
"""How long a launcher may take to start its workers, or to say what takes longer (an import, for --preload)."""
_OLD_S = 15.0
"""Whoever called for a seat does so again sooner than this, or not at all."""


class Seat:
    """What is known of one member. Times are on the job's clock."""

    __slots__ = (
        "_awaited", "_probed_at", "apply", "commenced", "host", "instance", "joined", "part", "peer", "refused",
        "start_until", "wanted_at",
    )  # fmt: skip

    def __init__(self) -> None:
        self.host = ""
        self.instance = ""
        self.wanted_at: float | None = None
        """From when on the policy wants to hear of it; None: it has not asked, or has heard."""
        self.joined = False
        self.start_until: float | None = None
        """When its workers are too late; None: none are to start."""
        self.have(None)

    def have(self, peer: Peer[p.FromPeer] | None) -> None:
        """Have the link of a launcher that has called, and has not said anything so far."""
        self.peer = peer
        self.apply: p.Apply | None = None
        self.refused = False
        """It cannot take part: nothing that it says matters."""
        self.part = Part(0)
        """What its launcher may say of attempts; output stays with it."""
        self.start_until = None
        self._awaited = 0
        self.commenced = 0.0
        """When it was told to start workers."""
        self._probed_at: float | None = None

    def leave(self) -> None:
        """Have no launcher any more; what it has said of itself is kept until the next one comes."""
        self.peer = None
        self.start_until = None

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

    def commence(self, workers: int, now: float) -> None:
        """Take in that its launcher is told to start so many workers."""
        self._awaited, self.commenced, self.start_until = workers, now, now + START_S

    def heard(self, message: p.FromPeer, now: float) -> None:
        """Take in what tells how far its launcher is with starting workers."""
        if self.start_until is None:
            return
        match message:
            case m.WorkerExited() | m.Gone() | m.Fault():
                self._awaited = 0
            case m.Started():
                self._awaited -= len(message.pids)
            case m.Remark() | m.PreloadEnded():
                pass
            case _:
                return
        # What takes long is told of again and again, each time after twice as long as before.
        self.start_until = None if self._awaited <= 0 else now + (now - self.commenced) + START_S


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
