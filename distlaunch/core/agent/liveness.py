"""How long the coordinator has been silent, as whoever it supervises judges that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from distlaunch.core.errors import ProtocolError
from distlaunch.core.protocol import agent_messages as m

LONGEST_S = 1e9
"""No time that a user may set is longer."""
LONGEST_POLL_S = 3600.0
"""``poll`` takes a C int of milliseconds: whoever waits for longer is woken in between."""
_SLEPT_S = 1.0
"""We have slept if we go on so much later than we should have."""


class Hearing:
    """Keeps when the coordinator was heard last. ``now`` gives seconds, which go on while the job
    is paused."""

    def __init__(self, silence_s: float, *, now: Callable[[], float] = time.monotonic) -> None:
        """``silence_s``: how long it may say nothing, until it says otherwise itself."""
        self._silence_s = silence_s
        self._now = now
        self._heard = now()
        self._due = now()  # when we should have gone on
        self._polled_at = now()

    def heard(self) -> None:
        """Take in that it has just said something, or could not."""
        self._heard = self._now()

    def take(self, ping: m.Ping) -> None:
        """Take in how long it may be silent from now on. Raises ProtocolError: no ping comes in
        time for that."""
        told_s = ping.silence_s
        if told_s is not None and not m.PING_S <= told_s <= LONGEST_S:
            raise ProtocolError(f"it wants to be taken for lost after {told_s:.3g} s of silence")
        self._silence_s = self._silence_s if told_s is None else told_s

    @property
    def left_s(self) -> float:
        """Give for how much longer it may be silent."""
        return self._heard + self._silence_s - self._now()

    @property
    def polled_s(self) -> float:
        """Give, after a poll, how long it took: pings would have ended it, so all else may have
        stood still."""
        return self._now() - self._polled_at

    def poll_ms(self, waits_s: Iterable[float]) -> float:
        """Give how long to poll, in ms, where these times may pass."""
        wait_s = max(0.0, min((*waits_s, LONGEST_POLL_S)))
        self._polled_at = self._now()
        self._due = self._polled_at + wait_s
        return wait_s * 1000 + 1

    def silent_s(self) -> float | None:
        """Give, after a poll and once all that had come was taken, how long it has been silent if
        that is too long."""
        now = self._now()
        if now > self._due + _SLEPT_S:  # its words may lie unread
            self._heard = max(self._heard, now - max(0.0, self._silence_s - m.LATE_S))
        return now - self._heard if self.left_s <= 0 else None
