r"""Layer ui.console: the rows that a program draws over by moving the cursor, as a terminal would show them.

A progress bar returns to the start of its row (``\r``); nested bars and live displays also move up to rows that they
have left (``\x1b[A``). ``Display`` interprets the bytes of one stream. It keeps the rows to which the program may
return, and gives every row away as a line once the program has left it for good:

* A program that hides the cursor, or moves up from an empty row below its display, redraws its display from the top.
  The rows above the top of the last redraw are final.
* Otherwise a row is final when the cursor has been below it for SETTLE_S.
* More rows than MOST_ROWS are final from the top, and so are rows of more than _MOST_CELLS in all.

Rows hold printable characters and colours only: no other control sequence of the program leaves this module.
"""

from __future__ import annotations

import codecs
import re
from unicodedata import category, east_asian_width

from distlaunch.ui.console.lines import PIECE

SETTLE_S = 1.0
"""How long the cursor must have been below a row for that to be final. tqdm returns at once, but for a busy machine."""
MOST_ROWS = 100
_MOST_CELLS = 2 * PIECE
"""Of all rows: with more, the rows are final from the top."""
_MOST_COLUMNS = 1000
"""The cursor cannot be moved to the right of these columns without writing: no screen is wider."""
_MOST_COLOURED = 4 * PIECE
"""A row that would take more bytes with its colours is shown without them."""
_STALE_S = 10.0
"""After so long without a move upwards, a program no longer counts as one that redraws."""
_MOST_STYLE = 160
_MOST_STATES = 16
_LONGEST_SEQUENCE = 4096
_RESET = "\x1b[0m"

_MOVES = re.compile(rb"\x1b\[(?:[0-9]{0,4}[AF]|\?25[lh])")
_TOKENS = re.compile(
    r"[^\x00-\x1f\x7f-\x9f]+"
    r"|\x1b\[([<-?]?)([0-9;:]*)[ -/]*([@-~])"
    r"|\x1b[\]P_^X][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|\x1b[ -/]*[0-Z\\^-~]"
    r"|[\x00-\x1f\x7f-\x9f]",
)
_UNFINISHED = re.compile(r"\x1b(?:\[[<-?]?[0-9;:]*[ -/]*|[\]P_^X][^\x07\x1b]*\x1b?|[ -/]*)?\Z")
_DELETE = 0x7F


def moves_cursor(data: bytes) -> bool:
    """Return whether these bytes move the cursor up, hide it or show it."""
    return _MOVES.search(data) is not None


class _Row:
    """One row: a character, and the colours that it has, for each column; ``""`` is the second half of a wide one."""

    __slots__ = ("cells", "left_s", "styles")

    def __init__(self) -> None:
        self.cells: list[str] = []
        self.styles: list[str] = []
        self.left_s = 0.0
        """When the cursor last went down from here."""

    def write(self, column: int, cells: list[str], style: str) -> None:
        if not cells:
            return
        if (missing := column - len(self.cells)) > 0:
            self.cells += [" "] * missing
            self.styles += [""] * missing
        end = column + len(cells)
        self.cells[column:end] = cells
        self.styles[column:end] = [style] * len(cells)

    def erase(self, start: int, end: int | None) -> None:
        if end is None or end >= len(self.cells):
            del self.cells[start:], self.styles[start:]
        else:
            self.write(start, [" "] * (end - start), "")

    def is_blank(self) -> bool:
        return not "".join(self.cells).strip()

    def render(self, columns: int | None = None) -> bytes:
        """Return the row's text with its colours, at most ``columns`` wide, without blanks at its end."""
        cells, styles = self.cells, self.styles
        end = len(cells) if columns is None else min(columns, len(cells))
        if columns and end < len(cells) and not cells[end]:
            end -= 1  # half of a wide character
        while end and cells[end - 1] == " " and not styles[end - 1]:
            end -= 1
        plain = "".join(cells[:end])
        if not any(styles[:end]):
            return plain.encode("utf-8", "replace")
        parts: list[str] = []
        last = ""
        for cell, style in zip(cells[:end], styles[:end], strict=True):
            if style != last:
                if last:
                    parts.append(_RESET)
                parts.append(style)
                last = style
            parts.append(cell)
        if last:
            parts.append(_RESET)
        coloured = "".join(parts)
        return (coloured if len(coloured) <= _MOST_COLOURED else plain).encode("utf-8", "replace")


class Display:
    """The rows that one stream draws over. Times are the console's."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._rows = [_Row()]
        self._at = 0
        self._column = 0
        self._style = ""
        self._hidden = False
        self._redraws = False
        """The program hides the cursor or rests below its display, and has moved up from there."""
        self._rising: int | None = None
        """The row from which the cursor is moving up."""
        self._top = 0
        self._reach = 0
        self._rose_s = 0.0

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Interpret bytes of the program; return the rows that are final, in order."""
        text = self._held + self._decoder.decode(data)
        self._held = ""
        if (unfinished := _UNFINISHED.search(text, max(0, len(text) - _LONGEST_SEQUENCE))) is not None:
            self._held = unfinished[0]
            text = text[: unfinished.start()]
        if text.count("\r") > _MOST_STATES and not moves_cursor(data):
            text = _without_old_states(text)
        done: list[bytes] = []
        for token in _TOKENS.finditer(text):
            first = token[0][0]
            if first == "\n":
                self._newline(now)
                if len(self._rows) > MOST_ROWS:
                    done += self._take(1)
            elif first == "\r":
                self._column = 0
            elif first == "\x1b":
                if token[3] is not None:
                    self._control(token[1], token[2], token[3], now)
            else:
                self._write(token[0], now)
        cells = sum(len(row.cells) for row in self._rows)
        while cells > _MOST_CELLS and len(self._rows) > 1:
            cells -= len(self._rows[0].cells)
            done += self._take(1)
        return done + self.settle(now)

    def settle(self, now: float) -> list[bytes]:
        """Return the rows that have become final."""
        return self._take(self._final(now))

    def due(self) -> float | None:
        """Return when ``settle`` is to be called next if nothing comes before."""
        if self._at == 0 or (self._hidden and self._redraws):
            return None
        if self._hidden or self._redraws:
            return max(self._rose_s + _STALE_S, self._rows[0].left_s + SETTLE_S)
        return self._rows[0].left_s + SETTLE_S

    def finish(self) -> list[bytes]:
        """Return all rows that show something: no more bytes will come, or the rows may be disturbed."""
        rows, self._rows = self._rows, [_Row()]
        self._at = self._column = self._top = 0
        return [row.render() for row in rows if not row.is_blank()]

    def rows(self, columns: int | None = None) -> list[bytes]:
        """Return what the display shows now, each row at most ``columns`` wide."""
        if columns is not None:
            columns = max(0, columns)  # a prefix may be wider than the terminal
        shown = [row.render(columns) for row in self._rows]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    @property
    def is_complete(self) -> bool:
        """Whether the cursor is visible and at the start of a row below which nothing is drawn."""
        if self._hidden or self._column or self._held:
            return False
        return all(row.is_blank() for row in self._rows[self._at :])

    @property
    def is_over(self) -> bool:
        """Whether nothing is left that the program could draw over."""
        return self._at == 0 and self.is_complete

    def _final(self, now: float) -> int:
        """Count the rows that are final, from the top."""
        if not self._at:
            return 0
        if self._redraws and not self._hidden and now >= self._rose_s + _STALE_S:
            self._redraws = False
        if self._redraws:
            return max(0, min(self._top, self._at - self._reach))
        if self._hidden and now < self._rose_s + _STALE_S:
            return 0
        for index in range(self._at):
            if self._rows[index].left_s + SETTLE_S > now:
                return index
        return self._at

    def _take(self, count: int) -> list[bytes]:
        if not count:
            return []
        done = [row.render() for row in self._rows[:count]]
        del self._rows[:count]
        self._at = max(0, self._at - count)
        self._top = max(0, self._top - count)
        if self._rising is not None:
            self._rising = max(0, self._rising - count)
        if not self._rows:
            self._rows.append(_Row())
        return done

    def _newline(self, now: float) -> None:
        self._end_rise(now)
        self._rows[self._at].left_s = now
        self._down(1)
        self._column = 0

    def _down(self, count: int) -> None:
        self._at += count
        while len(self._rows) <= self._at:
            self._rows.append(_Row())

    def _up(self, count: int) -> None:
        if self._rising is None:
            self._rising = self._at
            if not self._hidden:
                self._redraws = self._column == 0 and self._rows[self._at].is_blank()
        self._at = max(0, self._at - count)

    def _end_rise(self, now: float) -> None:
        """Note to which row the cursor has moved up, when the program goes on from there."""
        if self._rising is None:
            return
        self._reach = max(self._reach, self._rising - self._at)
        self._rising = None
        self._top = self._at
        self._rose_s = now
        self._redraws = self._redraws or self._hidden

    def _write(self, text: str, now: float) -> None:
        self._end_rise(now)
        first = text[0]
        if first == "\b":
            self._column = max(0, self._column - 1)
            return
        if first == "\t":
            self._column = max(self._column, min(self._column + 8 - self._column % 8, PIECE))
            return
        code = ord(first)
        if code < 0x20:
            text = chr(0x2400 + code)
        elif _DELETE <= code < 0xA0:
            text = "\ufffd"
        text = text[: max(0, PIECE - self._column)]
        cells = list(text) if text.isascii() else self._cells(text)
        self._rows[self._at].write(self._column, cells, self._style)
        self._column += len(cells)

    def _cells(self, text: str) -> list[str]:
        """Give each character the columns that it takes; one that combines goes with the one before."""
        cells: list[str] = []
        for char in text:
            if category(char) in ("Mn", "Me", "Cf"):
                at = next((at for at in range(len(cells) - 1, -1, -1) if cells[at]), None)
                if at is not None and len(cells[at]) < 8:
                    cells[at] += char
                continue
            cells.append(char)
            if east_asian_width(char) in "WF":
                cells.append("")
        return cells

    def _control(self, private: str, parameters: str, final: str, now: float) -> None:
        if private:
            if private == "?" and parameters == "25" and final in "lh":
                self._hidden = final == "l"
                self._redraws = False
                self._rose_s = now
            return
        if final == "m":
            self._colour(parameters)
            return
        count = min(int(parameters) if parameters.isdecimal() and len(parameters) <= 4 else 0, PIECE)
        row = self._rows[self._at]
        match final:
            case "A":
                self._up(count or 1)
            case "F":
                self._up(count or 1)
                self._column = 0
            case "B" | "E":
                self._end_rise(now)
                row.left_s = now
                self._down(min(count or 1, MOST_ROWS - 1 - self._at))
                self._column = 0 if final == "E" else self._column
            case "C":
                self._column = max(self._column, min(self._column + (count or 1), _MOST_COLUMNS))
            case "D":
                self._column = max(0, self._column - (count or 1))
            case "G":
                self._column = min(max(0, count - 1), _MOST_COLUMNS)
            case "K" if count == 0:
                row.erase(self._column, None)
            case "K" if count == 1:
                row.erase(0, self._column + 1)
            case "K":
                row.erase(0, None)
            case "J" if count == 0:
                row.erase(self._column, None)
                del self._rows[self._at + 1 :]
            case _:
                pass  # a program cannot clear the screen, or go where other lines are

    def _colour(self, parameters: str) -> None:
        if not parameters.strip("0;:"):
            self._style = ""
        elif len(parameters) < _MOST_STYLE // 2:
            style = f"\x1b[{parameters}m"
            kept = "" if parameters.startswith(("0;", ";")) else self._style
            while len(kept) + len(style) > _MOST_STYLE:
                kept = kept[kept.index("m") + 1 :]
            self._style = kept if kept.endswith(style) else kept + style


def _without_old_states(text: str) -> str:
    """Drop what a row showed many carriage returns ago."""
    lines = text.split("\n")
    for index, line in enumerate(lines):
        if line.count("\r") > _MOST_STATES:
            lines[index] = "\r" + "\r".join(line.rsplit("\r", _MOST_STATES)[1:])
    return "\n".join(lines)
