"""How long the coordinator has been silent, and whether that is too long."""

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


class SilenceMonitor:
    """Measures how long the coordinator has sent nothing.

    ``now`` returns seconds, which go on while the job is paused.
    """

    def __init__(self, silence_s: float, *, now: Callable[[], float] = time.monotonic) -> None:
        """``silence_s``: the limit, until a ping names another."""
        self._silence_s = silence_s
        self._now = now
        self._last = now()
        self._due = now()  # when we should have gone on
        self._polled_at = now()

    def reset(self) -> None:
        """Start counting anew: a message has come, or none could come (the job was paused)."""
        self._last = self._now()

    def on_ping(self, ping: m.Ping) -> None:
        """Use the limit that a ping names. Raises ProtocolError if pings come less often than that."""
        told_s = ping.silence_s
        if told_s is not None and not m.PING_S <= told_s <= LONGEST_S:
            raise ProtocolError(f"it wants to be taken for lost after {told_s:.3g} s of silence")
        self._silence_s = self._silence_s if told_s is None else told_s

    @property
    def left_s(self) -> float:
        """Seconds until the coordinator counts as lost."""
        return self._last + self._silence_s - self._now()

    @property
    def polled_s(self) -> float:
        """How long the last poll took.

        Pings would have ended a long poll, so other things may have stood still as well.
        """
        return self._now() - self._polled_at

    def poll_ms(self, waits_s: Iterable[float]) -> float:
        """Return how long to poll, in ms, if each of these times may pass."""
        wait_s = max(0.0, min((*waits_s, LONGEST_POLL_S)))
        self._polled_at = self._now()
        self._due = self._polled_at + wait_s
        return wait_s * 1000 + 1

    def silent_s(self) -> float | None:
        """Return how long the coordinator has been silent if that is too long, else None.

        Call it after a poll, once all messages that had come were handled.
        """
        now = self._now()
        if now > self._due + _SLEPT_S:  # its words may lie unread
            self._last = max(self._last, now - max(0.0, self._silence_s - m.LATE_S))
        return now - self._last if self.left_s <= 0 else None
