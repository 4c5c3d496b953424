"""The console of a job: it selects the ranks, the format and the descriptors of the output."""

from __future__ import annotations

import os
import threading
from time import monotonic, time
from typing import TYPE_CHECKING

from distlaunch.console.jsonl import JsonOutput, dropped_record
from distlaunch.console.live_rows import LiveRows
from distlaunch.console.prefixes import RESET, Prefixes, is_dumb, may_colour
from distlaunch.console.screen import Screen
from distlaunch.console.status_line import next_change, status_text
from distlaunch.console.terminal_writer import TerminalWriter
from distlaunch.console.writer import Writer
from distlaunch.coordinator.runtime.sink import Sink
from distlaunch.core.model.run_files import STDERR, STDOUT
from distlaunch.core.model.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Literal, Protocol

    from distlaunch.coordinator.runtime.sink import StatusView
    from distlaunch.planning.train_options import OutputFormat

TERMINAL_CLOSE_S = 2.0
"""How long closing waits for a terminal that accepts no bytes."""
_SUSPEND_S = 0.25
_STATUS_PACE_S = 0.1
_SGR = {"info": b"\x1b[2m", "warning": b"\x1b[33m", "error": b"\x1b[31m"}


def _close_timeout_s(writer: Writer, timeout_s: float | None) -> float | None:
    """Return how long closing may take: for a terminal at most TERMINAL_CLOSE_S, otherwise
    ``timeout_s`` (None: no limit).

    A stopped terminal must not prevent the job's end. Lines that are queued then are dropped.
    """
    if writer.on_terminal:
        return TERMINAL_CLOSE_S if timeout_s is None else min(timeout_s, TERMINAL_CLOSE_S)
    return timeout_s


def launcher_lines(text: str) -> bytes:
    """Return a message of the launcher as lines with the prefix ``distlaunch:``, without control
    characters."""
    return b"distlaunch: " + printable(text.removesuffix("\n"), keep="\n").encode()


if TYPE_CHECKING:

    class TextOutput(Protocol):
        """Shows the streams of one descriptor as text."""

        writer: Writer

        def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
            """Add a chunk."""

        def rank_ended(self, rank: int, now: float) -> None:
            """Finish the lines of this rank."""

        def flush_due(self, now: float) -> float | None:
            """Show output that is due. Return when the next is due, or None."""

        def show_launcher_lines(self, lines: bytes) -> None:
            """Show messages of the launcher."""

        def finish(self, now: float) -> None:
            """Show everything that is held."""


class Console(Sink):
    """The sink for worker output and the launcher's messages.

    The pump's thread and the main thread both use it. Its lock is never held during a write.
    """

    def __init__(
        self,
        *,
        out: TextOutput | JsonOutput,
        err: TextOutput | JsonOutput,
        shown: frozenset[int] | None,
        quiet: bool,
        colour: bool,
        status: TerminalWriter | None,
        clock: Callable[[], float],
    ) -> None:
        self._out = out
        self._err = err
        self._screens = (out,) if out is err else (out, err)
        self._writers = tuple(dict.fromkeys(screen.writer for screen in self._screens))
        self._shown = shown
        self._quiet = quiet
        self._colour = colour
        self._status_writer = status
        self._clock = clock
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = _do_nothing
        self._view: StatusView | None = None
        self._redraw_s: float | None = None
        self._drawn_s = -1.0
        self._suspended = False
        self._lost: int | None = None
        self._stalled_at: float | None = None
        """When the writer ran out of room. Workers cannot write then, so held lines wait longer,
        too."""
        self._stalled_s = 0.0
        """Total time without room before ``_stalled_at``."""

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Show a chunk of a rank's output, if the rank is shown."""
        if self._shown is not None and rank not in self._shown:
            return
        with self._lock:
            (self._out if stream == STDOUT else self._err).output(
                rank, stream, data, now - self._stalled_s
            )

    def rank_ended(self, rank: int, now: float) -> None:
        """Finish this rank's lines. The last line may wait another 0.1 s for equal lines of other
        ranks."""
        with self._lock:
            for screen in self._screens:
                screen.rank_ended(rank, now - self._stalled_s)

    def tick(self, now: float) -> float | None:
        """Show what is due, and redraw the status line. Return when the next call is due."""
        with self._lock:
            dues = self._flush_due(now)
            if self._redraw_s is not None and self._redraw_s <= now:
                self._draw(now)
            dues.append(self._redraw_s)
        return min((due for due in dues if due is not None), default=None)

    def _flush_due(self, now: float) -> list[float | None]:
        """Show what is due. Only the time in which workers could write counts. Return the next
        deadlines; none while the writers have no room."""
        if not self.has_room():
            if self._stalled_at is None:
                self._stalled_at = now
            return []
        if self._stalled_at is not None:
            self._stalled_s += now - self._stalled_at
            self._stalled_at = None
        dues = (screen.flush_due(now - self._stalled_s) for screen in self._screens)
        return [due + self._stalled_s for due in dues if due is not None]

    def has_room(self) -> bool:
        """Return whether all writers have room."""
        return all(writer.has_room() for writer in self._writers)

    def on_room(self, wake: Callable[[], None]) -> None:
        """Set the function to call when the writers have room again, or when ``tick`` is due
        earlier than the last call returned."""
        self._wake = wake
        for writer in self._writers:
            writer.on_room = wake

    def say(self, text: str, *, level: Literal["info", "warning", "error"] = "info") -> None:
        """Show a message of the launcher after all complete lines of workers.

        A ``quiet`` console hides messages of level info.
        """
        if self._quiet and level == "info":
            return
        with self._lock:
            if isinstance(self._err, JsonOutput):
                self._err.message(text, level)
                return
            lines = launcher_lines(text).split(b"\n")
            if self._colour:
                lines[0] = _SGR[level] + lines[0] + RESET
            self._err.show_launcher_lines(b"\n".join(lines) + b"\n")

    def event(self, record: Mapping[str, object]) -> None:
        """Write a job event, if the format is jsonl."""
        if isinstance(self._err, JsonOutput):
            with self._lock:
                self._err.event(record)

    def status(self, view: StatusView) -> None:
        """Update the live status line, at most every 0.1 s in one phase."""
        if self._status_writer is None:
            return
        with self._lock:
            now = self._clock()
            same_phase = self._view is not None and self._view.phase == view.phase
            self._view = view
            if self._suspended or (
                same_phase and now - self._drawn_s < _STATUS_PACE_S and self._redraw_s is not None
            ):
                return
            was_due = self._redraw_s
            self._draw(now)
            earlier = self._redraw_s is not None and was_due is None
        if earlier:
            self._wake()

    def suspend(self) -> None:
        """Clear the live rows, and wait a moment until the terminal has them."""
        with self._lock:
            self._suspended = True
            self._redraw_s = None
            terminals = [writer for writer in self._writers if isinstance(writer, TerminalWriter)]
            for writer in terminals:
                writer.hide_live_rows(hidden=True)
        for writer in terminals:
            writer.wait_idle(_SUSPEND_S)

    def resume(self) -> None:
        """Draw the live rows again."""
        with self._lock:
            self._suspended = False
            for writer in self._writers:
                if isinstance(writer, TerminalWriter):
                    writer.hide_live_rows(hidden=False)
            self._draw(self._clock())
        self._wake()

    def close(self, *, timeout_s: float | None, hurried: Callable[[], bool] = lambda: False) -> int:
        """Write everything. Return how many bytes a failed or blocked descriptor did not accept.

        Skipped and dropped lines are reported in the output instead. ``timeout_s`` is None if the
        job has succeeded. Once ``hurried`` returns True, the user wants a quick end.
        """
        if self._lost is None:
            with self._lock:
                now = self._clock()
                self._view = self._redraw_s = None
                for screen in self._screens:
                    screen.finish(now - self._stalled_s)
            for writer in self._writers:
                writer.begin_close()
            self._lost = sum(
                writer.finish_close(
                    _close_timeout_s(writer, timeout_s),
                    drops=timeout_s is not None,
                    hurried=hurried,
                )
                for writer in self._writers
            )
        return self._lost

    def _draw(self, now: float) -> None:
        self._redraw_s = None
        if self._view is None or self._suspended or self._status_writer is None:
            return
        self._status_writer.set_status(status_text(self._view, now))
        self._drawn_s = now
        self._redraw_s = next_change(self._view, now)


def open_console(
    *,
    world_size: int,
    environ: Mapping[str, str],
    format: OutputFormat | None = None,  # noqa: A002 - the option's name
    show: frozenset[int] | None = None,
    quiet: bool = False,
    stdout_fd: int = STDOUT,
    stderr_fd: int = STDERR,
    clock: Callable[[], float] = monotonic,
    wall: Callable[[], float] = time,
) -> Console:
    """Return the console of a job, with a screen for each of the two descriptors.

    ``show``: the result of ``parse_output_ranks``. The default format is rich if stderr is a
    terminal, else plain. NO_COLOR and TERM apply. If stdout is a pipe (``| tee log``), no status
    line is shown, because its reader may write to the same terminal.
    """
    dumb = is_dumb(environ)
    if format is None:
        format = "rich" if os.isatty(stderr_fd) else "plain"  # noqa: A001 - as above
    if format == "jsonl":
        writer = Writer(stdout_fd, dropped=dropped_record(wall))
        records = JsonOutput(writer, wall=wall)
        return Console(
            out=records,
            err=records,
            shown=show,
            quiet=quiet,
            colour=False,
            status=None,
            clock=clock,
        )

    colour = format == "rich" and may_colour(environ)
    ranks = range(world_size) if show is None else show

    def screen(fd: int) -> Screen:
        if not os.isatty(fd):
            return Screen(Writer(fd), ranks=ranks, prefixes=Prefixes(colour=False))
        prefixes = Prefixes(colour=colour)
        writer = TerminalWriter(fd, skipped=skipped_lines_text, colour=colour)
        live = LiveRows(writer, ranks=ranks, prefixes=prefixes, draws=not dumb)
        return Screen(writer, ranks=ranks, prefixes=prefixes, live=live)

    out = screen(stdout_fd)
    err = out if same_file(stdout_fd, stderr_fd) else screen(stderr_fd)
    terminal = err.writer if isinstance(err.writer, TerminalWriter) else None
    has_status = (
        format == "rich" and not quiet and not dumb and not _is_read_by_a_program(stdout_fd)
    )
    return Console(
        out=out,
        err=err,
        shown=show,
        quiet=quiet,
        colour=colour and terminal is not None,
        status=terminal if has_status else None,
        clock=clock,
    )


def same_file(one: int, two: int) -> bool:
    """Return whether two descriptors refer to the same file. They then share one writer, which
    keeps all lines in order."""
    try:
        first, second = os.fstat(one), os.fstat(two)
    except OSError:
        return False
    return (first.st_dev, first.st_ino, first.st_rdev) == (
        second.st_dev,
        second.st_ino,
        second.st_rdev,
    )


def _is_read_by_a_program(fd: int) -> bool:
    import stat

    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def skipped_lines_text(lines: int) -> bytes:
    """Return the output line that reports the number of skipped lines."""
    noun = "line" if lines == 1 else "lines"
    return f"… {lines:,} {noun} not shown; they are in the log files\n".encode()


def _do_nothing() -> None:
    pass
