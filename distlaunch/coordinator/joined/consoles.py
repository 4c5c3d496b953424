"""Sinks for the output of jobs with one launcher per node.

Warnings are shown on all nodes. The ranks of a node's workers may be shown as they are counted on
this node.
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
        """Show a message of distlaunch."""
        self._sink.say(text, level=level)

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Show a chunk of a rank's output."""
        self._sink.output(rank, stream, data, now)

    def rank_ended(self, rank: int, now: float) -> None:
        """Show the remaining output of a rank."""
        self._sink.rank_ended(rank, now)

    def tick(self, now: float) -> float | None:
        """Show the lines that have been held long enough. Return the time of the next call, or
        None."""
        return self._sink.tick(now)

    def has_room(self) -> bool:
        """Return whether the pump may continue reading."""
        return self._sink.has_room()

    def on_room(self, wake: Callable[[], None]) -> None:
        """Set the function that is called when ``has_room`` returns True again."""
        self._sink.on_room(wake)

    def event(self, record: Mapping[str, object]) -> None:
        """Show a job event."""
        self._sink.event(record)

    def status(self, view: StatusView) -> None:
        """Update the status line."""
        self._sink.status(view)

    def suspend(self) -> None:
        """Clear the status line."""
        self._sink.suspend()

    def resume(self) -> None:
        """Draw the status line again."""
        self._sink.resume()

    def close(self, *, timeout_s: float | None, hurried: Callable[[], bool] = lambda: False) -> int:
        """Write everything. Return the number of bytes that could not be shown."""
        return self._sink.close(timeout_s=timeout_s, hurried=hurried)


class LocalRanks(ForwardingSink):
    """Sink that numbers the ranks of this node from 0, as torchrun does. ``first_rank`` is set when
    an attempt starts."""

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self.first_rank = 0

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Show a chunk of output under the rank counted on this node."""
        self._sink.output(rank - self.first_rank, stream, data, now)

    def rank_ended(self, rank: int, now: float) -> None:
        """Show the remaining output of a rank."""
        self._sink.rank_ended(rank - self.first_rank, now)


class OuterRanks(ForwardingSink):
    """Sink that shows the only worker under its rank in the job of an outer launcher."""

    def __init__(self, sink: Sink, *, first_rank: int) -> None:
        super().__init__(sink)
        self._first_rank = first_rank

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Show a chunk of output under the worker's rank in the outer job."""
        self._sink.output(self._first_rank + rank, stream, data, now)

    def rank_ended(self, rank: int, now: float) -> None:
        """Show the remaining output of the worker."""
        self._sink.rank_ended(self._first_rank + rank, now)


class CoordinatorConsole(ForwardingSink):
    """Forwards every call to ``sink``, and warnings also to ``send``, which shows them on all
    nodes.

    It stores errors and the last message for the job's result, which the other launchers print.
    """

    def __init__(self, sink: Sink, send: Callable[[str, str], None]) -> None:
        super().__init__(sink)
        self._send = send
        self._errors: list[str] = []
        self._last = ""

    def verdict(self, exit_code: int, summary: str) -> p.ExitLauncher:
        """Return the message that ends the other launchers.

        If the job failed, the message has the errors of distlaunch; if there are none, as after a
        stop, its last message.
        """
        text = ("\n".join(self._errors) or self._last) if exit_code else ""
        return p.ExitLauncher(
            exit_code=exit_code, text=text, summary=summary, is_error=bool(self._errors)
        )

    def say(self, text: str, *, level: Literal["info", "warning", "error"] = "info") -> None:
        """Show a message of distlaunch. Send a warning to all nodes. Store an error, and the last
        message that is neither."""
        self._sink.say(text, level=level)
        if level == "error":
            self._errors.append(text)
        elif level == "warning":
            self._send(text, level)
        else:
            self._last = text
