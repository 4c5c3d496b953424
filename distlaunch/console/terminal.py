"""The lines of a terminal: harmless, of bounded length, and with progress bars that stay usable.

One rank at a time has the live rows at the bottom of the screen, where its bars move in place: the
lowest rank that is shown whenever it has a bar, else the first that has one. Lines of all ranks go
above these rows. The bars of the other ranks are shown as lines, at most every PROGRESS_S each.
"""

from __future__ import annotations

from collections.abc import Iterable

from distlaunch.console.escapes import clean, hold_back, is_clean
from distlaunch.console.lines import PARTIAL_S, PIECE, PROGRESS_S, Source
from distlaunch.console.prefixes import RESET, Prefixes
from distlaunch.console.screen import Screen
from distlaunch.console.terminal_writer import TerminalWriter

CUT = "… line continues, see the log".encode()
_FRAME_S = 0.05
"""Live rows are drawn at most this often."""


class TerminalScreen(Screen):
    """A screen for a person. ``draws``: the terminal can erase (a dumb one cannot, and gets bars as
    lines)."""

    def __init__(
        self, writer: TerminalWriter, *, ranks: Iterable[int], prefixes: Prefixes, draws: bool
    ) -> None:
        super().__init__(writer, ranks=ranks, prefixes=prefixes)
        self._start_drawing(writer, draws=draws, lead=min(ranks, default=0))

    def _start_drawing(self, terminal: TerminalWriter, *, draws: bool, lead: int) -> None:
        self._terminal = terminal
        self._draws = draws
        self._lead = lead
        self._coloured = False
        self._owner: int | None = None
        """The rank that has the live rows."""
        self._owner_moved_s = 0.0
        self._drawn_s = -_FRAME_S
        self._draw_due: float | None = None

    def rank_ended(self, rank: int, now: float) -> None:
        """Finish the lines of this rank, whose live rows become lines."""
        super().rank_ended(rank, now)
        self._release_rows()
        self._send()

    def flush_due(self, now: float) -> float | None:
        """Show what has been held long enough; return when the next is due."""
        due = super().flush_due(now)
        if self._draw_due is not None and self._draw_due <= now:
            self._draw_bars(now)
        return min((each for each in (due, self._draw_due) if each is not None), default=None)

    def finish(self, now: float) -> None:
        """Show everything that is held."""
        super().finish(now)
        self._release_rows()

    # --- lines

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
        if not is_clean(block) or (
            len(block) > PIECE and max(map(len, block.split(b"\n"))) > PIECE
        ):
            block = b"\n".join(map(_tidy, block.split(b"\n")))
        super()._add(rank, block, now)

    def _hold_s(self, source: Source) -> float:
        """Beside live rows the cursor cannot stay in an unfinished line: each of its pieces becomes
        a line."""
        return PARTIAL_S if self._owner in (None, source.rank) else PROGRESS_S

    def _show(self, source: Source) -> None:
        self._partial.pop(source, None)
        shown, held = hold_back(bytes(source.buf))
        if not shown:
            return
        if self._owner == source.rank and source.due >= self._owner_moved_s + PARTIAL_S:
            for other in self._live():  # a prompt, while its bar stands still
                self._end_display(other, source.due)
            self._release_rows()
        if self._claim(source):
            source.length = 0
        source.buf[:] = held
        self._write_piece(source, shown)
        if self._owner is not None:
            self._end_open()

    def _write_piece(self, source: Source, piece: bytes) -> None:
        """Show a piece of the open line, and give up on the rest of a line that has become too
        long."""
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

    # --- bars

    def _move(self, source: Source, data: bytes, now: float) -> None:
        if b"\r" in (bytes(source.buf) + data)[:-1] and self._may_own(source.rank, now):
            self._draw(source, data, now)
        else:  # of another rank, or what may be a line end that is not complete
            super()._move(source, data, now)

    def _moved(self, source: Source, now: float) -> None:
        if source not in self._bars:
            self._plan_bar(source, max(now + PARTIAL_S, source.paced_s + PROGRESS_S))

    def _show_bar(self, source: Source, now: float) -> None:
        if source.display is None and self._may_own(source.rank, now):
            self._draw(source, b"", now)
        else:
            super()._show_bar(source, now)

    def _may_own(self, rank: int, now: float) -> bool:
        """Return whether the live rows are this rank's, or it may have them."""
        free = self._owner in (None, rank) or now >= self._owner_moved_s + PROGRESS_S
        return self._draws and (free or rank == self._lead)

    def _drawn(self, source: Source, now: float) -> None:
        if source.display is None or source.display.is_over or not self._may_own(source.rank, now):
            super()._drawn(source, now)
            self._release_rows()
            return
        if self._owner != source.rank:
            before = self._live()
            self._owner = source.rank
            for other in before:
                self._moved(other, now)
            self._end_open()
        self._owner_moved_s = now
        self._bars.pop(source, None)
        if self._drawn_s + _FRAME_S <= now:
            self._draw_bars(now)
        elif self._draw_due is None:
            self._draw_due = self._drawn_s + _FRAME_S

    def _put_rows(self, source: Source, rows: list[bytes], now: float) -> None:
        if self._owner != source.rank or not rows:
            super()._put_rows(source, rows, now)
            return
        # They are on the screen already, as live rows: they are not held to be folded with other
        # ranks'.
        self._release(source.rank)
        self._emit(source.rank, rows)
        self._draw_bars(now)

    def _live(self) -> list[Source]:
        return [source for source in self._drawing if source.rank == self._owner]

    def _release_rows(self) -> None:
        """Give the live rows up if their rank has no display any more."""
        if self._owner is not None and not self._live():
            self._owner = None
            self._draw_due = None
            self._terminal.set_bars(())

    def _draw_bars(self, now: float) -> None:
        self._draw_due = None
        self._drawn_s = now
        rows: list[bytes] = []
        if self._owner is not None:
            prefix = self._prefix(self._owner)
            columns = self._terminal.columns - len(f"[{self._owner}] ")
            for source in self._live():
                if source.display is not None:
                    rows += [prefix + row for row in source.display.rows(columns)]
        self._terminal.set_bars(tuple(rows))


def _tidy(line: bytes) -> bytes:
    """Make one whole line fit for a terminal."""
    if len(line) > PIECE:
        return clean(line[:PIECE]) + CUT
    return clean(line)
