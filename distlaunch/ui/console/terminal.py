"""Layer ui.console: the lines of a terminal: harmless, of bounded length, and with progress bars that stay usable.

A carriage return starts the visible text of a line anew. The rank whose unfinished line has the cursor draws over it
at once; any other shows its newest state at most every PARTIAL_S, on a line of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from distlaunch.ui.console.escapes import clean, hold_back, is_clean
from distlaunch.ui.console.lines import PIECE, Source
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

    def _extend(self, source: Source, data: bytes, now: float) -> None:
        if b"\r" in data:
            data = _newest(bytes(source.buf) + data)
            source.buf.clear()
        super()._extend(source, data, now)

    def _show(self, source: Source) -> None:
        self._partial.pop(source, None)
        text = bytes(source.buf)
        state = text.strip(b"\r")
        ended = len(text) > 1 and text.endswith(b"\r")
        shown, held = (state, b"") if ended else hold_back(state)
        if not shown:
            return
        if self._claim(source):
            source.length = 0
        elif text.startswith(b"\r"):
            self._out.append(b"\r" + self._erase + self._prefix(source.rank))
            source.length = 0
        source.buf[:] = b"\r" if ended else held
        self._write_piece(source, shown)

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
        rest = rest.rstrip(b"\r")
        if b"\r" in rest:
            rest = rest[rest.rfind(b"\r") + 1 :]
            self._out.append(b"\r" + self._erase + self._prefix(source.rank))
            source.length = 0
        if rest:
            self._write_piece(source, rest)
        source.cut = False
        self._end_open()

    def _end_open(self) -> None:
        if self._open is not None and self._coloured:
            self._out.append(RESET)
        self._coloured = False
        super()._end_open()

    def _end(self, source: Source, now: float) -> None:
        if source.buf.strip(b"\r") or self._open is source:
            super()._end(source, now)


def _newest(text: bytes) -> bytes:
    r"""Keep the newest state of a progress bar: ``\r`` and the state, then ``\r`` if one has come after it."""
    state = text.rstrip(b"\r")
    start = state.rfind(b"\r")
    if start < 0 and state:
        return state + b"\r"
    return b"\r" + state[start + 1 :] + (b"\r" if state and len(state) < len(text) else b"")


def _tidy(line: bytes) -> bytes:
    """Make one whole line fit for a terminal."""
    if b"\r" in line:
        line = line.rstrip(b"\r")
        line = line[line.rfind(b"\r") + 1 :]
    if len(line) > PIECE:
        return clean(line[:PIECE]) + CUT
    return clean(line)
