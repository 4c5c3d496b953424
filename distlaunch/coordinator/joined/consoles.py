"""Consoles of jobs with one launcher per node.

Warnings are shown on all nodes. Ranks may be shown as they are counted on this node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from distlaunch.coordinator.runtime.sink import Sink, StatusView
from distlaunch.core.protocol import launcher_messages as p


class ForwardingSink(Sink):
    """Sink that passes every call on to another sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def say(self, text: str, *, level: Literal["info", "warning", "error"] = "info") -> None:
        """Show messages of distlaunch; see ``Sink``."""
        self._sink.say(text, level=level)

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Show a chunk; see ``Sink``."""
        self._sink.output(rank, stream, data, now)

    def rank_ended(self, rank: int, now: float) -> None:
        """Show the rest of a rank's output; see ``Sink``."""
        self._sink.rank_ended(rank, now)

    def tick(self, now: float) -> float | None:
        """Show the lines that have been held long enough; see ``Sink``."""
        return self._sink.tick(now)

    def has_room(self) -> bool:
        """Return whether the pump may continue; see ``Sink``."""
        return self._sink.has_room()

    def on_room(self, wake: Callable[[], None]) -> None:
        """Set the function to call when there is room again; see ``Sink``."""
        self._sink.on_room(wake)

    def event(self, record: Mapping[str, object]) -> None:
        """Show an event; see ``Sink``."""
        self._sink.event(record)

    def status(self, view: StatusView) -> None:
        """Update the status line; see ``Sink``."""
        self._sink.status(view)

    def suspend(self) -> None:
        """Clear the status line; see ``Sink``."""
        self._sink.suspend()

    def resume(self) -> None:
        """Draw the status line again; see ``Sink``."""
        self._sink.resume()

    def close(self, *, timeout_s: float | None, hurried: Callable[[], bool] = lambda: False) -> int:
        """Flush everything; see ``Sink``."""
        return self._sink.close(timeout_s=timeout_s, hurried=hurried)


class LocalRanks(ForwardingSink):
    """Console that shows only the ranks of this node, counted from 0, as torchrun does."""

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self.first_rank = 0

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Show a chunk; see ``Sink``."""
        self._sink.output(rank - self.first_rank, stream, data, now)

    def rank_ended(self, rank: int, now: float) -> None:
        """Show the rest of a rank's output; see ``Sink``."""
        self._sink.rank_ended(rank - self.first_rank, now)


class OuterRanks(ForwardingSink):
    """Console that shows the only worker with the rank that an outer launcher has given to it."""

    def __init__(self, sink: Sink, *, first_rank: int) -> None:
        super().__init__(sink)
        self._first_rank = first_rank

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Show a chunk; see ``Sink``."""
        self._sink.output(self._first_rank + rank, stream, data, now)

    def rank_ended(self, rank: int, now: float) -> None:
        """Show the rest of a rank's output; see ``Sink``."""
        self._sink.rank_ended(self._first_rank + rank, now)


class CoordinatorConsole(ForwardingSink):
    """Passes every call on to ``sink``, and warnings also to ``send``.

    It keeps the errors and the last message for the job's result, which the other launchers print.
    """

    def __init__(self, sink: Sink, send: Callable[[str, str], None]) -> None:
        super().__init__(sink)
        self._send = send
        self._errors: list[str] = []
        self._last = ""

    def verdict(self, exit_code: int, summary: str) -> p.ExitLauncher:
        """Return the message that ends the other launchers.

        It carries the errors of a job that failed, or the last line of a job that was stopped.
        """
        text = ("\n".join(self._errors) or self._last) if exit_code else ""
        return p.ExitLauncher(
            exit_code=exit_code, text=text, summary=summary, is_error=bool(self._errors)
        )

    def say(self, text: str, *, level: Literal["info", "warning", "error"] = "info") -> None:
        """Show messages of distlaunch; see ``Sink``."""
        self._sink.say(text, level=level)
        if level == "error":
            self._errors.append(text)
        elif level == "warning":
            self._send(text, level)
        else:
            self._last = text
