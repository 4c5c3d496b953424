"""Where worker output and our own lines go. ``ui.console`` implements it; tests use a list.

Threads: ``output``, ``rank_ended`` and ``tick`` are called by the output pump's thread only;
``say``, ``event``, ``status`` by the main thread; ``has_room`` by either. None of them blocks: a
sink buffers, and says when it is full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from distlaunch.coordinator.policy.job_progress import Summary
from distlaunch.core.model.record import Record


class StatusView(Record):
    """What the live status line shows. ``phase`` is starting, running, lingering, stopping,
    restarting or ended."""

    phase: Literal["starting", "running", "lingering", "stopping", "restarting", "ended"]
    workers_up: int
    workers_total: int
    attempt: int
    restarts: int
    max_restarts: int
    started_s: float
    """Monotonic time at which the job began."""
    log_dir: str
    progress: Summary | None = None
    """How far the attempt is, if its workers report."""
    heard_s: float = 0.0
    """Monotonic time at which the newest heartbeat came."""


class Sink(Protocol):
    """The console side of a job."""

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Take a chunk (any length, any bytes) that ``rank`` wrote to STDOUT or STDERR at monotonic
        ``now``."""

    def rank_ended(self, rank: int, now: float) -> None:
        """Show what is held of this rank, also a line without its newline: no more will come in
        this attempt."""

    def tick(self, now: float) -> float | None:
        """Show what has been held long enough; return the monotonic time of the next deadline, or
        None."""

    def has_room(self) -> bool:
        """Return whether the pump may go on reading; False while a pipe or file is slow (never for a
        terminal)."""

    def on_room(self, wake: Callable[[], None]) -> None:
        """Set what to call, from any thread, when ``has_room`` has become true again.

        Also called when the next ``tick`` is due earlier than it has said (a status line has
        appeared).
        """

    def say(self, text: str, *, level: Literal["info", "warning", "error"] = "info") -> None:
        """Show lines of our own (stderr; under jsonl as an event). ``text`` may have several
        lines."""

    def event(self, record: Mapping[str, object]) -> None:
        """Show a job event (a JSON-able record that ``events.jsonl`` has too): only jsonl prints
        it."""

    def status(self, view: StatusView) -> None:
        """Update the live status line (terminal only)."""

    def suspend(self) -> None:
        """Clear the status line: the launcher is about to be stopped (Ctrl-Z) or the terminal
        handed over."""

    def resume(self) -> None:
        """Draw again after ``suspend``."""

    def close(self, *, timeout_s: float | None, hurried: Callable[[], bool] = lambda: False) -> int:
        """Flush everything and stop the writers. Return how many bytes could not be shown.
        Idempotent.

        With None it takes as long as the reader takes. Otherwise the job has failed or was stopped:
        lines of workers that are still queued after a moment may be dropped (a line counts them),
        so that our own lines come, and the wait ends after ``timeout_s`` without progress. Once
        ``hurried`` returns true both is so, within a second.
        """
