r"""What ``distlaunch torchrun`` shows: output as torchrun's users know it, stream by stream.

``raw`` bytes pass as they are, unfinished lines too; ``tee`` shows whole lines behind the prefix
that the template gives; ``hidden`` shows nothing. Unlike torchrun's, a tee'd line is never torn by
another rank's, and a progress bar is one line with its newest state, not one for each of its
states.

Of several raw ranks on one descriptor an unfinished line is held for HOLD_S: unbuffered Python
writes a line and its newline in two pieces, between which another rank's would come.
"""

from __future__ import annotations

import os
from time import monotonic
from typing import TYPE_CHECKING, Literal

from distlaunch.console.console import Console, same_file, skipped_note
from distlaunch.console.lines import PIECE, Lines
from distlaunch.console.prefixes import Prefixes
from distlaunch.console.screen import Screen
from distlaunch.console.terminal import TerminalScreen
from distlaunch.console.terminal_writer import TerminalWriter
from distlaunch.console.writer import Writer
from distlaunch.core.model.run_files import STDERR, STDOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Mode = Literal["raw", "tee", "hidden"]

HOLD_S = 0.05


class _Held:
    """The unfinished line of a raw stream."""

    __slots__ = ("buf", "due")

    def __init__(self) -> None:
        self.buf = bytearray()
        self.due = 0.0


class RawOrTee(Screen):
    """The streams that end in one descriptor, of which some are not made into lines."""

    def __init__(
        self, writer: Writer, *, prefixes: Prefixes, modes: Mapping[tuple[int, int], Mode]
    ) -> None:
        Screen.__init__(self, writer, ranks=(), prefixes=prefixes)
        self._show_as(modes)

    def _show_as(self, modes: Mapping[tuple[int, int], Mode]) -> None:
        self._modes = modes
        self._alone = len({rank for (rank, _), mode in modes.items() if mode == "raw"}) <= 1
        self._held: dict[tuple[int, int], _Held] = {}
        self._raw_open = False
        """The cursor stands in a raw line that has not ended."""

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Take a chunk; see ``job.sink.Sink``."""
        mode = self._modes.get((rank, stream), "raw")
        if mode == "raw":
            self._take_raw(rank, stream, data, now)
        elif mode == "tee":
            super().output(rank, stream, data, now)

    def rank_ended(self, rank: int, now: float) -> None:
        """Show what is held of this rank."""
        self._release(rank)
        super().rank_ended(rank, now)

    def flush_due(self, now: float) -> float | None:
        """Show what has been held long enough; return when the next is due."""
        raw = None
        for key, held in list(self._held.items()):
            if held.due > now:
                raw = held.due
                break
            del self._held[key]
            self._pass(bytes(held.buf))
        lines = super().flush_due(now)
        return min((due for due in (raw, lines) if due is not None), default=None)

    def finish(self, now: float) -> None:
        """Show everything that is held; a raw line without its newline stays one."""
        self._release(None)
        Lines.finish(self, now)
        super()._end_open()
        self._send()

    def _take_raw(self, rank: int, stream: int, data: bytes, now: float) -> None:
        if self._alone:
            self._pass(data)
            return
        key = (rank, stream)
        for other in (STDOUT, STDERR):  # a rank's own order never changes
            if other != stream and (late := self._held.pop((rank, other), None)):
                self._pass(bytes(late.buf))
        held = self._held.get(key)
        cut = data.rfind(b"\n") + 1
        if cut:
            if held is not None:
                del self._held[key]
                self._pass(bytes(held.buf) + data[:cut])
            else:
                self._pass(data[:cut])
            held = None
            data = data[cut:]
        if not data:
            return
        if held is None:
            held = self._held[key] = _Held()
            held.due = now + HOLD_S
        held.buf += data
        if len(held.buf) >= PIECE:
            del self._held[key]
            self._pass(bytes(held.buf))

    def _release(self, rank: int | None) -> None:
        """Show what is held of one rank, or of all (None)."""
        for key in [key for key in self._held if rank in (None, key[0])]:
            self._pass(bytes(self._held.pop(key).buf))

    def _pass(self, data: bytes) -> None:
        """Show bytes as they are; only a tee'd line that stands unfinished is ended first."""
        self._raw_open = False  # no end for that: it goes on
        self._insert(data)
        self._send()
        self._raw_open = not data.endswith(b"\n")

    def _end_open(self) -> None:
        if self._raw_open:
            self._raw_open = False
            self._out.append(b"\n")
        super()._end_open()


class RawOrTeeTerminal(RawOrTee, TerminalScreen):
    """The same for a terminal: raw bytes pass as they are there too, tee'd lines are made
    harmless."""

    def __init__(
        self,
        writer: TerminalWriter,
        *,
        prefixes: Prefixes,
        modes: Mapping[tuple[int, int], Mode],
        draws: bool,
    ) -> None:
        TerminalScreen.__init__(self, writer, ranks=(), prefixes=prefixes, draws=draws)
        self._show_as(modes)


class _Given(Prefixes):
    """The prefixes that torchrun's template gives."""

    def __init__(self, given: Mapping[int, bytes]) -> None:
        super().__init__(colour=False)
        self._given = given

    def __call__(self, who: int | frozenset[int]) -> bytes:
        return self._given.get(who, b"") if isinstance(who, int) else b""


def open_torchrun_console(
    *,
    modes: Mapping[tuple[int, int], Mode],
    prefixes: Mapping[int, bytes],
    environ: Mapping[str, str],
    quiet: bool,
    stdout_fd: int = STDOUT,
    stderr_fd: int = STDERR,
    clock: Callable[[], float] = monotonic,
) -> Console:
    """Open the console of ``distlaunch torchrun``.

    ``modes`` by rank and stream (one that is missing is raw), ``prefixes`` by rank, for tee'd
    lines. Our own lines go to stderr, with ``quiet`` only warnings and errors; there is no status
    line.
    """
    dumb = environ.get("TERM") in ("dumb", "unknown")
    colour = not dumb and not environ.get("NO_COLOR") and os.isatty(stderr_fd)
    given = _Given(prefixes)
    shared = same_file(stdout_fd, stderr_fd)

    def screen(fd: int, streams: tuple[int, ...]) -> Screen:
        shown = {key: mode for key, mode in modes.items() if key[1] in streams}
        if not os.isatty(fd):
            return RawOrTee(Writer(fd), prefixes=given, modes=shown)
        writer = TerminalWriter(fd, skipped=skipped_note, colour=colour)
        return RawOrTeeTerminal(writer, prefixes=given, modes=shown, draws=not dumb)

    out = screen(stdout_fd, (STDOUT, STDERR) if shared else (STDOUT,))
    err = out if shared else screen(stderr_fd, (STDERR,))
    return Console(
        out=out, err=err, shown=None, quiet=quiet, colour=colour, status=None, clock=clock
    )
