"""The interface for worker output and distlaunch's own messages.

``console`` implements the interface. The output pump's thread calls ``output``, ``rank_ended`` and
``tick``. The main thread calls ``say``, ``event`` and ``status``. Both call ``has_room``. None of
these methods blocks: a sink buffers, and ``has_room`` returns False when the buffer is full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from distlaunch.coordinator.policy.job_progress import Summary
from distlaunch.core.model.record import Record


class StatusView(Record):
    """The values that the live status line shows.

    ``phase`` is starting, running, lingering, stopping, restarting or ended.
    """

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
    """The progress of the attempt, if its workers report any."""
    heard_s: float = 0.0
    """Monotonic time at which the newest heartbeat arrived."""


class Sink(Protocol):
    """The output of a job on the console."""

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Accept a chunk that ``rank`` wrote to STDOUT or STDERR at the monotonic time ``now``.

        The chunk has any length and may hold any bytes.
        """

    def rank_ended(self, rank: int, now: float) -> None:
        """Show all output of this rank that is held, including a last line without a newline.

        No more output of the rank follows in this attempt.
        """

    def tick(self, now: float) -> float | None:
        """Show the lines that have been held long enough.

        Return the monotonic time of the next deadline, or None.
        """

    def has_room(self) -> bool:
        """Return whether the pump may continue reading.

        Return False while the reader of a pipe or file is slow. For a terminal, always return True.
        """

    def on_room(self, wake: Callable[[], None]) -> None:
        """Set the function to call, from any thread, when ``has_room`` returns True again.

        The sink also calls the function if the next ``tick`` is due earlier than the last ``tick``
        returned, for example because a status line has appeared.
        """

    def say(self, text: str, *, level: Literal["info", "warning", "error"] = "info") -> None:
        """Show a message of distlaunch on stderr, or as an event with jsonl. ``text`` may have
        several lines."""

    def event(self, record: Mapping[str, object]) -> None:
        """Show a job event. Only the jsonl format does. The event is also written to
        ``events.jsonl``."""

    def status(self, view: StatusView) -> None:
        """Update the live status line, if the output is a terminal."""

    def suspend(self) -> None:
        """Clear the status line before the launcher is suspended (Ctrl-Z) or the terminal is handed
        over."""

    def resume(self) -> None:
        """Draw the status line again after ``suspend``."""

    def close(self, *, timeout_s: float | None, hurried: Callable[[], bool] = lambda: False) -> int:
        """Write everything and stop the writers. Return the number of bytes that could not be
        shown.

        May be called again. If ``timeout_s`` is None, wait as long as the reader needs. Otherwise
        the job has failed or was stopped: lines of workers that are still queued after a moment may
        be dropped, so that distlaunch's own messages are shown. One line reports the number of
        dropped lines. The wait ends after ``timeout_s`` without progress. Once ``hurried`` returns
        True, lines are dropped in any case, and the wait ends within a second.
        """
