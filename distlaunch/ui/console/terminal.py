"""Layer ui.console: the lines of a terminal: harmless, of bounded length, and with progress bars that stay usable.

A carriage return starts the visible text of a line anew. While only one bar moves, it is drawn over in place. While
several do, they would take the cursor from each other for ever: so each shows its newest state as a line of its own,
at most every PROGRESS_S.
"""

from __future__ import annotations

from collections.abc import Iterable

from distlaunch.ui.console.escapes import clean, hold_back, is_clean
from distlaunch.ui.console.lines import PARTIAL_S, PIECE, PROGRESS_S, Source
from distlaunch.ui.console.ranks import RESET, Prefixes
from distlaunch.ui.console.screen import Screen
from distlaunch.ui.console.writer import Writer

CUT = "… line continues, see the log".encode()


class TerminalScreen(Screen):
    """A screen for a person; ``erase`` clears from the cursor to the line's end (empty for a dumb terminal)."""

    def __init__(self, writer: Writer, *, ranks: Iterable[int], prefixes: Prefixes, erase: bytes) -> None:
        super().__init__(writer, ranks=ranks, prefixes=prefixes)
        self._erase = erase
        self._coloured = False
        self._moving: dict[Source, float] = {}

    def rank_ended(self, rank: int, now: float) -> None:
        """Finish the lines of this rank, which no longer competes for the cursor."""
        super().rank_ended(rank, now)
        for source in [source for source in self._moving if source.rank == rank]:
            del self._moving[source]

    def _take(self, source: Source, data: bytes, now: float) -> None:
        if source.cut:
            at = data.find(b"\n")
            if at < 0:
                return
            source.cut = False
            data = data[at + 1 :]
        super()._take(source, data, now)

    def _add(self, rank: int, block: bytes, now: float) -> None:
        if b"\r" in block:
            block = block.replace(b"\r\n", b"\n").removesuffix(b"\r")
        if not is_clean(block) or (len(block) > PIECE and max(map(len, block.split(b"\n"))) > PIECE):
            block = b"\n".join(map(_tidy, block.split(b"\n")))
        super()._add(rank, block, now)

    def _show(self, source: Source) -> None:
        self._partial.pop(source, None)
        shown, held = hold_back(bytes(source.buf))
        if not shown:
            return
        if self._claim(source):
            source.length = 0
        source.buf[:] = held
        self._write_piece(source, shown)

    def _moved(self, source: Source, now: float) -> None:
        if b"\r" in source.buf[:-1]:  # else it may be a line end that is not complete
            self._moving.pop(source, None)
            self._moving[source] = now
        if self._compete(source, now):
            if self._open is not None and self._open.bar:
                self._end_open()
            if source not in self._bars:
                self._plan_bar(source, max(now + PARTIAL_S, source.paced_s + PROGRESS_S))
        elif self._open is source:
            self._bars.pop(source, None)
            self._show_bar(source, now)
        elif source not in self._bars or source.due > now + PARTIAL_S:
            self._plan_bar(source, now + PARTIAL_S)

    def _compete(self, source: Source, now: float) -> bool:
        """Tell whether another bar has moved lately."""
        moving = self._moving
        while moving and moving[first := next(iter(moving))] + PROGRESS_S <= now:
            del moving[first]
        return len(moving) > (source in moving)

    def _show_state(self, source: Source, state: bytes, now: float) -> None:
        if self._compete(source, now):
            super()._show_state(source, state, now)
        else:
            self._redraw(source, state)

    def _complete_bar(self, source: Source, state: bytes, shown: bytes | None, now: float) -> None:
        if self._open is source and state != shown and state:
            self._redraw(source, state)
            source.cut = False
            shown = state
        super()._complete_bar(source, state, shown, now)

    def _redraw(self, source: Source, state: bytes) -> None:
        """Draw a state over the one before, or on a new line if the cursor is elsewhere."""
        if not self._claim(source):
            self._out.append(b"\r" + self._erase + self._prefix(source.rank))
        source.length = 0
        self._write_piece(source, state)

    def _write_piece(self, source: Source, piece: bytes) -> None:
        """Show a piece of the open line, and give up on the rest of a line that has become too long."""
        out = clean(piece[: PIECE - source.length], reset=False)
        self._coloured = self._coloured or b"\x1b" in out
        self._out.append(out)
        source.length += len(piece)
        if source.length > PIECE:
            self._out.append(CUT)
            self._end_open()
            source.cut = True
            source.started = False
            source.buf.clear()

    def _finish(self, source: Source, rest: bytes) -> None:
        rest = rest.removesuffix(b"\r")
        if rest:
            self._write_piece(source, rest)
        source.cut = False
        self._end_open()

    def _end_open(self) -> None:
        if self._open is not None and self._coloured:
            self._out.append(RESET)
        self._coloured = False
        super()._end_open()


def _tidy(line: bytes) -> bytes:
    """Make one whole line fit for a terminal."""
    if len(line) > PIECE:
        return clean(line[:PIECE]) + CUT
    return clean(line)
