"""The console of ``distlaunch torchrun``: shows each stream as torchrun's users expect.

A ``raw`` stream is passed on unchanged, a ``tee`` stream as complete lines with the prefix of
torchrun's template, a ``hidden`` one not at all. Unlike in torchrun, lines of ``tee`` streams are
never mixed, and a progress bar is one line.

If several ranks are raw on one descriptor, unfinished lines are held for HOLD_S: unbuffered Python
writes a line and its newline separately.
"""

from __future__ import annotations

import os
from time import monotonic
from typing import TYPE_CHECKING, Literal

from distlaunch.console.console import Console, same_file, skipped_lines_text
from distlaunch.console.lines import PIECE
from distlaunch.console.live_rows import LiveRows
from distlaunch.console.prefixes import Prefixes, is_dumb, may_colour
from distlaunch.console.screen import Screen
from distlaunch.console.terminal_writer import TerminalWriter
from distlaunch.console.writer import Writer
from distlaunch.core.model.run_files import STDERR, STDOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Mode = Literal["raw", "tee", "hidden"]

HOLD_S = 0.05


class _HeldLine:
    __slots__ = ("buf", "due")

    def __init__(self) -> None:
        self.buf = bytearray()
        self.due = 0.0


class TorchrunOutput:
    """The streams of one descriptor, raw or as lines."""

    def __init__(self, screen: Screen, modes: Mapping[tuple[int, int], Mode]) -> None:
        self.writer = screen.writer
        self._screen = screen
        self._modes = modes
        self._is_only_raw_rank = (
            len({rank for (rank, _), mode in modes.items() if mode == "raw"}) <= 1
        )
        self._held: dict[tuple[int, int], _HeldLine] = {}

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Show a chunk in the mode of its stream."""
        mode = self._modes.get((rank, stream), "raw")
        if mode == "raw":
            self._add_raw(rank, stream, data, now)
        elif mode == "tee":
            self._screen.output(rank, stream, data, now)

    def rank_ended(self, rank: int, now: float) -> None:
        """Show all output of a rank that is held."""
        self._show_held(rank)
        self._screen.rank_ended(rank, now)

    def flush_due(self, now: float) -> float | None:
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
        """Show all output that is held. A raw line gets no newline."""
        self._show_held(None)
        self._screen.finish(now)

    def show_launcher_lines(self, lines: bytes) -> None:
        self._screen.show_launcher_lines(lines)

    def _add_raw(self, rank: int, stream: int, data: bytes, now: float) -> None:
        if self._is_only_raw_rank:
            self._screen.raw_output(data)
            return
        key = (rank, stream)
        for other in (STDOUT, STDERR):  # keeps the order of a rank's streams
            if other != stream and (other_held := self._held.pop((rank, other), None)):
                self._screen.raw_output(bytes(other_held.buf))
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
            held = self._held[key] = _HeldLine()
            held.due = now + HOLD_S
        held.buf += data
        if len(held.buf) >= PIECE:
            del self._held[key]
            self._screen.raw_output(bytes(held.buf))

    def _show_held(self, rank: int | None) -> None:
        for key in [key for key in self._held if rank in (None, key[0])]:
            self._screen.raw_output(bytes(self._held.pop(key).buf))


class _TemplatePrefixes(Prefixes):
    def __init__(self, template_prefixes: Mapping[int, bytes]) -> None:
        super().__init__(colour=False)
        self._prefixes = template_prefixes

    def __call__(self, who: int | frozenset[int]) -> bytes:
        return self._prefixes.get(who, b"") if isinstance(who, int) else b""


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
    """Return the console of ``distlaunch torchrun``, which has no status line.

    ``modes`` are by rank and stream (default: raw), ``prefixes`` by rank, for ``tee`` streams. If
    ``quiet``, only warnings and errors of the launcher are shown.
    """
    dumb = is_dumb(environ)
    colour = may_colour(environ) and os.isatty(stderr_fd)
    template_prefixes = _TemplatePrefixes(prefixes)
    shared = same_file(stdout_fd, stderr_fd)

    def screen(fd: int, streams: tuple[int, ...]) -> TorchrunOutput:
        shown = {key: mode for key, mode in modes.items() if key[1] in streams}
        if not os.isatty(fd):
            return TorchrunOutput(Screen(Writer(fd), ranks=(), prefixes=template_prefixes), shown)
        writer = TerminalWriter(fd, skipped=skipped_lines_text, colour=colour)
        live = LiveRows(writer, ranks=(), prefixes=template_prefixes, draws=not dumb)
        return TorchrunOutput(
            Screen(writer, ranks=(), prefixes=template_prefixes, live=live), shown
        )

    out = screen(stdout_fd, (STDOUT, STDERR) if shared else (STDOUT,))
    err = out if shared else screen(stderr_fd, (STDERR,))
    return Console(
        out=out, err=err, shown=None, quiet=quiet, colour=colour, status=None, clock=clock
    )
