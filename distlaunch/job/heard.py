"""Layer job: which of the signals that launcher and agents get are to be acted on. Pure."""

from __future__ import annotations

import signal

from distlaunch.core.model.record import replace
from distlaunch.job.actions import Signalled

ECHO_S = 2.0
"""A signal that comes to one launcher or agent after another within this is one: whoever sends it sends it to all."""
HOLD_S = 0.1
"""So long after the first, others may tell of it: then workers have got it as well."""
_HELD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """Takes each signal for one, to however many of us it comes.

    ``holds``: where the scheduler signals workers as well, the first waits a moment for the word of an agent that it
    did, or for that of a second launcher, which shows it: so workers do not get it twice.
    """

    def __init__(self, *, holds: bool) -> None:
        self._holds = holds
        self._counted: dict[int, tuple[float, int | None]] = {}  # when each came, and to whom
        self._held: dict[int, tuple[float, Signalled]] = {}

    def take(self, event: Signalled, now: float) -> Signalled | None:
        """Give the event if it is to be acted on now."""
        at, to = self._counted.get(event.signum, (-ECHO_S, None))
        if to != event.node and now - at < ECHO_S:
            return None
        if self._holds and not event.reached and not event.kill and event.signum in _HELD:
            _, first = self._held.setdefault(event.signum, (now + HOLD_S, event))
            if first.node == event.node:
                return None
            event = replace(event, reached=True)
        self._held.pop(event.signum, None)
        self._counted[event.signum] = now, event.node
        return event

    def deadline(self) -> float | None:
        """Give when ``due`` has something."""
        return min((until for until, _ in self._held.values()), default=None)

    def due(self, now: float) -> list[Signalled]:
        """Give those that have waited long enough."""
        found = [event for until, event in self._held.values() if until <= now]
        for event in found:
            del self._held[event.signum]
            self._counted[event.signum] = now, event.node
        return found
