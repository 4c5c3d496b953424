"""Decide which reports of a signal the job acts on, and which only repeat it. No clock, no I/O.

Launchers, agents and spawners report signals. Several of them may report one signal of a scheduler
or user.
"""

from __future__ import annotations

import signal
from enum import Enum, auto

from distlaunch.coordinator.policy.events_and_actions import Signalled
from distlaunch.core.model.record import replace

ECHO_S = 30.0
"""A report that arrives later than this after the last one that was acted on is a new signal. A
scheduler may need this time to signal all processes."""
HOLD_S = 0.1
"""How long to wait after the first report of a signal for further reports, which show whether the
workers received it, too."""
_HELD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""The signals whose first report is held back for ``HOLD_S``: a scheduler may send them to all
processes of a job."""
MERGE_S = 0.1
"""Signals closer together than this are considered one. A terminal signals a whole process group,
and a wrapper passes Ctrl-C on."""
SECOND_S = 1.0
"""A second stop signal within this many seconds of the first is ignored. The third one is not.
Notebooks send INT twice within 0.5 s, and uv repeats a Ctrl-C after 0.2 s."""


class StopSignal(Enum):
    """What a signal that asks to stop the job means, considering those before it."""

    MERGED = auto()
    """The signal is a repetition of the one just before."""
    EARLY = auto()
    """The second signal within ``SECOND_S``, which is ignored."""
    FIRST = auto()
    """It is the first request: stop the workers."""
    AGAIN = auto()
    """It is a later request: the user or the scheduler is impatient."""


class StopSignalCounter:
    """Classifies signals that ask to stop the job. Times are seconds on any monotonic clock."""

    def __init__(self) -> None:
        self._first = self._last = 0.0
        """The times of the first and of the latest signal that was not ``MERGED``."""
        self._seen = 0
        """How many signals came that were not ``MERGED``."""

    def classify(self, now: float) -> StopSignal:
        """Return the meaning of a signal received at ``now``.

        A signal less than ``MERGE_S`` after the latest one is ``MERGED`` with it. Merged signals
        aside, the second signal is ``EARLY`` within ``SECOND_S`` of the first, and the third is
        ``AGAIN`` even then.
        """
        if not self._seen:
            self._seen, self._first, self._last = 1, now, now
            return StopSignal.FIRST
        if now - self._last < MERGE_S:
            return StopSignal.MERGED
        self._seen, self._last = self._seen + 1, now
        if self._seen == 2 and now - self._first < SECOND_S:
            return StopSignal.EARLY
        return StopSignal.AGAIN


class _Count:
    """The reports of one signal number. Times are seconds on the job's clock."""

    __slots__ = ("acted", "at", "senders")

    def __init__(self) -> None:
        self.acted = 0
        """How many reports of the signal were acted on."""
        self.at = 0.0
        """When a report was last acted on. Without meaning while ``acted`` is 0."""
        self.senders: dict[tuple[int | None, bool], int] = {}
        """How often each process has reported the signal, by ``Signalled.sender``."""

    def at_time(self, now: float) -> _Count:
        """Reset the numbers if the last report that was acted on is ``ECHO_S`` ago. Return self."""
        if self.acted and now - self.at >= ECHO_S:
            self.acted, self.senders = 0, {}
        return self

    def add(self, sender: tuple[int | None, bool]) -> int:
        """Count a report of this process. Return how many reports it has made."""
        self.senders[sender] = self.senders.get(sender, 0) + 1
        return self.senders[sender]

    def act(self, now: float) -> None:
        """Record that a report is acted on at ``now``."""
        self.acted, self.at = self.acted + 1, now


class Signals:
    """Selects one report of each signal, if several launchers, agents and spawners report it.

    The user or scheduler may have signalled all of these processes, or only one. Therefore the n-th
    report of one process is ignored if the job has acted on the n-th report of another process. A
    report with ``kill`` is never ignored.

    ``holds``: the scheduler may signal the workers as well. The first report of a signal is then
    held for a moment. If meanwhile an agent reports that its workers have the signal, or a second
    launcher reports the signal, it is not sent to the workers.
    """

    def __init__(self, *, holds: bool) -> None:
        self._holds = holds
        self._counts: dict[int, _Count] = {}
        """By signal number."""
        self._held: dict[int, tuple[float, Signalled]] = {}
        """By signal number: the report that is held back, and when it is due (seconds on the job's
        clock)."""

    def on_signal(self, event: Signalled, now: float) -> Signalled | None:
        """Return the event if the job must act on it now; None if it is held or ignored."""
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
        """Return when ``due`` returns the next event, on the job's clock; None if none is held."""
        return min((until for until, _ in self._held.values()), default=None)

    def due(self, now: float) -> list[Signalled]:
        """Return the held events whose waiting time is over, and hold them no longer."""
        due: list[Signalled] = []
        found = [event for until, event in self._held.values() if until <= now]
        for event in found:
            until, _ = self._held.pop(event.signum)
            count = self._counts[event.signum]
            count.add(event.sender)
            count.act(now)
            due.append(replace(event, came=until - HOLD_S))
        return due
