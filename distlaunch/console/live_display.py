r"""The rows that a program draws over by moving the cursor, as a terminal would show them.

A progress bar returns to the start of its row (``\r``); nested bars and live displays also move up
to rows that they have left (``\x1b[A``). ``Display`` interprets the bytes of one stream. It keeps
the rows to which the program may return, and gives every row away as a line once the program has
left it for good:

* A program that hides the cursor, or moves up from an empty row below its display, redraws its
  display from the top. The rows above the top of the last redraw are final.
* Otherwise a row is final SETTLE_S after the cursor has left it for a lower one, if what was
  written since shows that the program will not return: the row is no bar, or the program has
  completed a line or redrawn a bar below it; and the row is further up than the program has ever
  moved from the lowest row.
* A program that has written lines for _STALE_S without a move upwards no longer counts as one that
  moves up.
* More rows than MOST_ROWS are final from the top, and so are rows of more than _MOST_CELLS in all.

Time alone makes no row final that may be drawn again: a worker may stand still in the middle of
drawing.

Rows hold printable characters and colours only: no other control sequence of the program leaves
this module.
"""

from __future__ import annotations

import codecs
import re
from unicodedata import category, east_asian_width

SETTLE_S = 1.0
"""How long the cursor must have been below a row for that to be final."""
MOST_ROWS = 100
_MOST_CELLS_OF_A_ROW = 64 << 10
_MOST_CELLS = 2 * _MOST_CELLS_OF_A_ROW
"""Of all rows: with more, the rows are final from the top."""
_MOST_COLUMNS = 1000
"""The cursor cannot be moved to the right of these columns without writing: no screen is wider."""
_MOST_COLOURED = 4 * _MOST_CELLS_OF_A_ROW
"""A row that would take more bytes with its colours is shown without them."""
_STALE_S = 10.0
"""After writing lines for so long without a move upwards, a program no longer counts as one that
moves up."""
_PAUSE_S = 1.0
"""A longer time between two lines counts as this long."""
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
    """One row: a character, and the colours that it has, for each column; ``""`` is the second half
    of a wide one."""

    __slots__ = ("cells", "is_bar", "left_s", "styles")

    def __init__(self) -> None:
        self.cells: list[str] = []
        self.styles: list[str] = []
        self.left_s = 0.0
        """When the cursor last went down from here."""
        self.is_bar = False
        """The program has drawn over it, or returned to its start to draw."""

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
        """Return the row's text with its colours, at most ``columns`` wide, without blanks at its
        end."""
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
        """How many rows the program moves up at most."""
        self._wrote = False
        """Something was written in this row since the cursor came to it."""
        self._returned = False
        """The cursor has returned to the start of this row, and nothing was written since."""
        self._passed = 0
        """The program has gone on below the first so many rows, and has not returned to them."""
        self._left_s = 0.0
        """When the cursor last went down."""
        self._lines_s = 0.0
        """How long the program has written lines since it last moved up or hid the cursor; pauses
        count little."""

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Interpret bytes of the program; return the rows that are final, in order."""
        text = self._held + self._decoder.decode(data)
        self._held = ""
        if (
            unfinished := _UNFINISHED.search(text, max(0, len(text) - _LONGEST_SEQUENCE))
        ) is not None:
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
                self._returned = True
            elif first == "\x1b":
                if token[3] is not None:
                    self._control(token[1], token[2], token[3], now)
            else:
                self._write(token[0])
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
        return self._rows[0].left_s + SETTLE_S if self._left_for_good() else None

    def finish(self) -> list[bytes]:
        """Return all rows that show something: no more bytes will come, or the rows may be
        disturbed."""
        rows, self._rows = self._rows, [_Row()]
        self._at = self._column = self._top = self._passed = 0
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
        if self._redraws:
            return max(0, min(self._top, self._at - self._reach))
        count = self._left_for_good()
        for index in range(count):
            if self._rows[index].left_s + SETTLE_S > now:
                return index
        return count

    def _left_for_good(self) -> int:
        """Count the rows, from the top, to which the program will not return as far as can be
        seen."""
        if self._redraws or (self._hidden and self._lines_s < _STALE_S):
            return 0
        count = min(self._at, len(self._rows) - 1 - self._reach)
        for index in range(self._passed, count):
            if self._rows[index].is_bar:
                return index
        return max(0, count)

    def _take(self, count: int) -> list[bytes]:
        if not count:
            return []
        done = [row.render() for row in self._rows[:count]]
        del self._rows[:count]
        self._at = max(0, self._at - count)
        self._top = max(0, self._top - count)
        self._passed = max(0, self._passed - count)
        if self._rising is not None:
            self._rising = max(0, self._rising - count)
        if not self._rows:
            self._rows.append(_Row())
        return done

    def _newline(self, now: float) -> None:
        self._end_rise()
        self._down(1, now)
        self._column = 0

    def _down(self, count: int, now: float) -> None:
        row = self._rows[self._at]
        row.left_s = now
        if self._wrote and (
            self._reach or not row.is_bar
        ):  # without a move up so far, several rows may be one frame
            self._passed = max(self._passed, self._at)
        self._wrote = self._returned = False
        self._lines_s += min(now - self._left_s, _PAUSE_S)
        self._left_s = now
        if self._lines_s >= _STALE_S:
            self._reach = 0
            self._redraws = False
        self._at += count
        while len(self._rows) <= self._at:
            self._rows.append(_Row())

    def _up(self, count: int) -> None:
        if self._rising is None:
            self._rising = self._at
            if not self._hidden:
                self._redraws = self._column == 0 and self._rows[self._at].is_blank()
        self._at = max(0, self._at - count)
        self._wrote = False

    def _end_rise(self) -> None:
        """Note to which row the cursor has moved up, when the program goes on from there."""
        if self._rising is None:
            return
        self._reach = max(self._reach, self._rising - self._at)
        self._rising = None
        self._top = self._at
        self._passed = min(self._passed, self._at)
        self._rows[self._at].is_bar = True
        self._lines_s = 0.0
        self._redraws = self._redraws or self._hidden

    def _write(self, text: str) -> None:
        self._end_rise()
        first = text[0]
        if first == "\b":
            self._column = max(0, self._column - 1)
            return
        if first == "\t":
            self._column = max(
                self._column, min(self._column + 8 - self._column % 8, _MOST_CELLS_OF_A_ROW)
            )
            return
        code = ord(first)
        if code < 0x20:
            text = chr(0x2400 + code)
        elif _DELETE <= code < 0xA0:
            text = "\ufffd"
        text = text[: max(0, _MOST_CELLS_OF_A_ROW - self._column)]
        cells = list(text) if text.isascii() else self._cells(text)
        row = self._rows[self._at]
        row.write(self._column, cells, self._style)
        row.is_bar = row.is_bar or self._returned
        self._column += len(cells)
        if not text.isspace():
            if self._wrote and self._returned:
                self._passed = max(self._passed, self._at)
            self._wrote = True
            self._returned = False

    def _cells(self, text: str) -> list[str]:
        """Return each character the columns that it takes; one that combines goes with the one
        before."""
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
                self._lines_s = 0.0
                if not self._hidden:  # the program has left what it has drawn
                    self._reach = 0
                    self._passed = max(self._passed, self._at)
            return
        if final == "m":
            self._colour(parameters)
            return
        count = min(
            int(parameters) if parameters.isdecimal() and len(parameters) <= 4 else 0,
            _MOST_CELLS_OF_A_ROW,
        )
        row = self._rows[self._at]
        match final:
            case "A":
                self._up(count or 1)
            case "F":
                self._up(count or 1)
                self._column = 0
                self._returned = True
            case "B" | "E":
                self._end_rise()
                self._down(min(count or 1, MOST_ROWS - 1 - self._at), now)
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
