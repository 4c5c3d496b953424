"""Detect that the coordinator has been silent for too long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from distlaunch.core.errors import ProtocolError
from distlaunch.core.protocol import agent_messages as m

LONGEST_S = 1e9
"""Longest time that a user may configure."""
LONGEST_POLL_S = 3600.0
"""Longest poll. ``poll`` takes milliseconds as a C int."""
_SUSPENDED_S = 1.0
"""A wakeup this late means that the process was suspended."""


class SilenceMonitor:
    """Measures how long the coordinator has sent nothing.

    ``now`` returns seconds of a clock that also runs while the job is paused.
    """

    def __init__(self, silence_s: float, *, now: Callable[[], float] = time.monotonic) -> None:
        """``silence_s`` is the limit until a ping sets another limit."""
        self._silence_s = silence_s
        self._now = now
        self._last = now()
        self._due = now()  # when the last poll should have returned
        self._polled_at = now()

    def reset(self) -> None:
        """Start measuring anew, after a message or a pause in which none could arrive."""
        self._last = self._now()

    def on_ping(self, ping: m.Ping) -> None:
        """Use the limit of a ping, if it has one. Raises ProtocolError if it is shorter than the
        time between two pings."""
        limit_s = ping.silence_s
        if limit_s is not None and not m.PING_S <= limit_s <= LONGEST_S:
            raise ProtocolError(f"it asks to be considered lost after {limit_s:.3g} s of silence")
        self._silence_s = self._silence_s if limit_s is None else limit_s

    @property
    def left_s(self) -> float:
        """Seconds until the coordinator is considered lost."""
        return self._last + self._silence_s - self._now()

    @property
    def polled_s(self) -> float:
        """Duration of the last poll.

        Every ping ends a poll, so after a long poll the coordinator was silent or this process
        suspended.
        """
        return self._now() - self._polled_at

    def poll_ms(self, waits_s: Iterable[float]) -> float:
        """Return the timeout for a poll in milliseconds: the shortest of these waits."""
        wait_s = max(0.0, min((*waits_s, LONGEST_POLL_S)))
        self._polled_at = self._now()
        self._due = self._polled_at + wait_s
        return wait_s * 1000 + 1

    def silent_s(self) -> float | None:
        """Return how long the coordinator has been silent, if this exceeds the limit.

        Must be called when all messages that the last poll announced have been handled.
        """
        now = self._now()
        if now > self._due + _SUSPENDED_S:  # its messages may still be unread
            self._last = max(self._last, now - max(0.0, self._silence_s - m.LATE_S))
        return now - self._last if self.left_s <= 0 else None
