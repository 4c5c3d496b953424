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
from distlaunch.console.lines import PIECE
from distlaunch.console.live_rows import LiveRows
from distlaunch.console.prefixes import Prefixes
from distlaunch.console.screen import Screen
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


class RawOrTee:
    """The streams that end in one descriptor, of which some are not made into lines.

    ``screen`` shows the lines of tee'd streams, and raw bytes as they are.
    """

    def __init__(self, screen: Screen, modes: Mapping[tuple[int, int], Mode]) -> None:
        self.writer = screen.writer
        self._screen = screen
        self._modes = modes
        self._alone = len({rank for (rank, _), mode in modes.items() if mode == "raw"}) <= 1
        self._held: dict[tuple[int, int], _Held] = {}

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Take a chunk; see ``coordinator.runtime.sink.Sink``."""
        mode = self._modes.get((rank, stream), "raw")
        if mode == "raw":
            self._take_raw(rank, stream, data, now)
        elif mode == "tee":
            self._screen.output(rank, stream, data, now)

    def rank_ended(self, rank: int, now: float) -> None:
        """Show what is held of this rank."""
        self._release(rank)
        self._screen.rank_ended(rank, now)

    def flush_due(self, now: float) -> float | None:
        """Show what has been held long enough; return when the next is due."""
        raw = None
        for key, held in list(self._held.items()):
            if held.due > now:
                raw = held.due
                break
            del self._held[key]
            self._screen.raw_output(bytes(held.buf))
        lines = self._screen.flush_due(now)
        return min((due for due in (raw, lines) if due is not None), default=None)

    def finish(self, now: float) -> None:
        """Show everything that is held; a raw line without its newline stays one."""
        self._release(None)
        self._screen.finish(now)

    def interject(self, lines: bytes) -> None:
        """Show lines of our own, even on a stopped terminal."""
        self._screen.interject(lines)

    def _take_raw(self, rank: int, stream: int, data: bytes, now: float) -> None:
        if self._alone:
            self._screen.raw_output(data)
            return
        key = (rank, stream)
        for other in (STDOUT, STDERR):  # a rank's own order never changes
            if other != stream and (late := self._held.pop((rank, other), None)):
                self._screen.raw_output(bytes(late.buf))
        held = self._held.get(key)
        cut = data.rfind(b"\n") + 1
        if cut:
            if held is not None:
                del self._held[key]
                self._screen.raw_output(bytes(held.buf) + data[:cut])
            else:
                self._screen.raw_output(data[:cut])
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
            self._screen.raw_output(bytes(held.buf))

    def _release(self, rank: int | None) -> None:
        """Show what is held of one rank, or of all (None)."""
        for key in [key for key in self._held if rank in (None, key[0])]:
            self._screen.raw_output(bytes(self._held.pop(key).buf))


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

    def screen(fd: int, streams: tuple[int, ...]) -> RawOrTee:
        shown = {key: mode for key, mode in modes.items() if key[1] in streams}
        if not os.isatty(fd):
            return RawOrTee(Screen(Writer(fd), ranks=(), prefixes=given), shown)
        writer = TerminalWriter(fd, skipped=skipped_note, colour=colour)
        live = LiveRows(writer, ranks=(), prefixes=given, draws=not dumb)
        return RawOrTee(Screen(writer, ranks=(), prefixes=given, live=live), shown)

    out = screen(stdout_fd, (STDOUT, STDERR) if shared else (STDOUT,))
    err = out if shared else screen(stderr_fd, (STDERR,))
    return Console(
        out=out, err=err, shown=None, quiet=quiet, colour=colour, status=None, clock=clock
    )
