"""Which of the signals that launcher and agents get are to be acted on; no clock, no I/O."""

from __future__ import annotations

import signal
from enum import Enum, auto

from distlaunch.coordinator.policy.events_and_actions import Signalled
from distlaunch.core.model.record import replace

ECHO_S = 30.0
"""After so long without a signal that was acted on, the next is no echo: a scheduler may take its
time with all."""
HOLD_S = 0.1
"""So long after the first, others may tell of it: then workers have got it as well."""
_HELD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
MERGE_S = 0.1
"""Signals closer than this are one: a terminal signals a whole process group, and a wrapper passes
Ctrl-C on."""
SECOND_S = 1.0
"""A second signal closer to the first than this does not count: notebooks send INT twice within 0.5
s, and uv repeats a Ctrl-C after 0.2 s."""


class Request(Enum):
    """How a signal that ends a job counts."""

    MERGED = auto()
    """One with the signal before."""
    EARLY = auto()
    """The second within ``SECOND_S``; it changes nothing."""
    FIRST = auto()
    AGAIN = auto()
    """Somebody insists."""


class StopRequests:
    """Counts signals that end a job. Times are seconds on any monotonic clock."""

    def __init__(self) -> None:
        self._first = self._last = 0.0
        self._seen = 0

    def take(self, now: float) -> Request:
        """Return how a signal that came at ``now`` counts. A third one counts however soon it
        comes."""
        if not self._seen:
            self._seen, self._first, self._last = 1, now, now
            return Request.FIRST
        if now - self._last < MERGE_S:
            return Request.MERGED
        self._seen, self._last = self._seen + 1, now
        if self._seen == 2 and now - self._first < SECOND_S:
            return Request.EARLY
        return Request.AGAIN


class _Count:
    """How often each launcher, agent or spawner has told of one signal, and how often it was acted
    on."""

    __slots__ = ("acted", "at", "senders")

    def __init__(self) -> None:
        self.acted = 0
        self.at = 0.0
        """When it was acted on last, in seconds."""
        self.senders: dict[tuple[int | None, bool], int] = {}

    def at_time(self, now: float) -> _Count:
        """Begin anew if what was counted is too old."""
        if self.acted and now - self.at >= ECHO_S:
            self.acted, self.senders = 0, {}
        return self

    def add(self, sender: tuple[int | None, bool]) -> int:
        self.senders[sender] = self.senders.get(sender, 0) + 1
        return self.senders[sender]

    def act(self, now: float) -> None:
        self.acted, self.at = self.acted + 1, now


class Signals:
    """Takes each signal for one, to however many of us it comes, and however far apart.

    Whoever sends it sends it to all, or to one alone: the n-th of one launcher, agent or spawner
    counts unless the n-th of another has; what a person typed to kill always does. ``holds``: where
    the scheduler signals workers as well, the first waits a moment for the word of an agent that it
    did, or for that of a second launcher, which shows it: so workers do not get it twice.
    """

    def __init__(self, *, holds: bool) -> None:
        self._holds = holds
        self._counts: dict[int, _Count] = {}  # by signal
        self._held: dict[int, tuple[float, Signalled]] = {}

    def take(self, event: Signalled, now: float) -> Signalled | None:
        """Return the event if it is to be acted on now."""
        count = self._counts.setdefault(event.signum, _Count()).at_time(now)
        if not event.kill and count.senders.get(event.sender, 0) < count.acted:
            count.add(event.sender)
            return None
        held = self._held.get(event.signum)
        if self._holds and not event.reached and not event.kill and event.signum in _HELD:
            if held is None:
                self._held[event.signum] = now + HOLD_S, event
                return None
            if held[1].sender == event.sender:
                return None
            event = replace(event, reached=True)
        if held is not None:
            del self._held[event.signum]
            event = replace(event, came=held[0] - HOLD_S)
            if held[1].sender != event.sender:
                count.add(held[1].sender)
        count.add(event.sender)
        count.act(now)
        return event

    def deadline(self) -> float | None:
        """Return when ``due`` has something."""
        return min((until for until, _ in self._held.values()), default=None)

    def due(self, now: float) -> list[Signalled]:
        """Return those that have waited long enough."""
        due: list[Signalled] = []
        found = [event for until, event in self._held.values() if until <= now]
        for event in found:
            until, _ = self._held.pop(event.signum)
            count = self._counts[event.signum]
            count.add(event.sender)
            count.act(now)
            due.append(replace(event, came=until - HOLD_S))
        return due
