"""Interpret the output of a program that moves the cursor, as a terminal would.

``Display`` stores the rows to which the program may return. A row to which it will not return is
final, and becomes a line:

A program that hides the cursor, or moves up from an empty row below its display, redraws from the
top. The rows above the top of the last redraw are final.

Otherwise a row is final SETTLE_S after the cursor has moved down from it, if it is not a bar (or
the program has since completed a line or redrawn a bar below), and if it is further up than the
program has ever moved from the lowest row.

If a program has written lines for _STALE_S without moving up, its earlier moves are forgotten. With
more than MAX_ROWS rows or _MAX_CELLS cells, the top rows are final. Time alone does not make a row
final, since a worker may pause while drawing. Rows contain only printable characters and colours.
"""

from __future__ import annotations

import codecs
import re
from unicodedata import category, east_asian_width

SETTLE_S = 1.0
"""How long the cursor must have been below a row."""
MAX_ROWS = 100
_MAX_ROW_CELLS = 64 << 10
_MAX_CELLS = 2 * _MAX_ROW_CELLS
"""With more cells, the top rows become final."""
_MAX_COLUMNS = 1000
"""The cursor cannot move beyond it unless text is written."""
_MAX_COLOURED_BYTES = 4 * _MAX_ROW_CELLS
"""A longer row is shown without colours."""
_STALE_S = 10.0
_PAUSE_S = 1.0
"""A longer pause between two lines counts as this long."""
_MAX_STYLE = 160
_MAX_STATES = 16
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
    """One row: for each column, the character and its colours; ``""`` is the second column of a
    wide character."""

    __slots__ = ("cells", "is_bar", "left_s", "styles")

    def __init__(self) -> None:
        self.cells: list[str] = []
        self.styles: list[str] = []
        self.left_s = 0.0
        """When the cursor last moved down from it."""
        self.is_bar = False
        """Whether the program has overwritten the row, or moved to its start to do so."""

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
        """Return the row with its colours, at most ``columns`` wide, without trailing blanks."""
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
        return (coloured if len(coloured) <= _MAX_COLOURED_BYTES else plain).encode(
            "utf-8", "replace"
        )


class Display:
    """Rows that a program may redraw. Times are on the console's clock."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._rows = [_Row()]
        self._row = 0
        self._column = 0
        self._style = ""
        self._is_cursor_hidden = False
        self._redraws_from_top = False
        """Whether the program hides the cursor or stops below its display, and has moved up from
        there."""
        self._move_up_from: int | None = None
        """The row from which the cursor is moving up."""
        self._top = 0
        self._max_moved_up = 0
        self._has_written = False
        """Whether the row was written to since the cursor moved to it."""
        self._has_returned = False
        """Whether the cursor has returned to the start of this row without writing since."""
        self._rows_left = 0
        """Rows, from the top, that the program has left and not returned to."""
        self._left_s = 0.0
        self._lines_time_s = 0.0
        """How long the program has written lines since it last moved up or hid the cursor."""

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Interpret output. Remove the rows that have become final, and return them as lines."""
        text = self._held + self._decoder.decode(data)
        self._held = ""
        if (
            unfinished := _UNFINISHED.search(text, max(0, len(text) - _LONGEST_SEQUENCE))
        ) is not None:
            self._held = unfinished[0]
            text = text[: unfinished.start()]
        if text.count("\r") > _MAX_STATES and not moves_cursor(data):
            text = _drop_old_states(text)
        done: list[bytes] = []
        for token in _TOKENS.finditer(text):
            first = token[0][0]
            if first == "\n":
                self._newline(now)
                if len(self._rows) > MAX_ROWS:
                    done += self._remove_rows(1)
            elif first == "\r":
                self._column = 0
                self._has_returned = True
            elif first == "\x1b":
                if token[3] is not None:
                    self._apply_control(token[1], token[2], token[3], now)
            else:
                self._write_text(token[0])
        cells = sum(len(row.cells) for row in self._rows)
        while cells > _MAX_CELLS and len(self._rows) > 1:
            cells -= len(self._rows[0].cells)
            done += self._remove_rows(1)
        return done + self.settle(now)

    def settle(self, now: float) -> list[bytes]:
        """Remove rows that have become final, and return them as lines."""
        return self._remove_rows(self._count_final_rows(now))

    def due(self) -> float | None:
        """Return when to call ``settle`` if no more output arrives; None if no row waits."""
        return self._rows[0].left_s + SETTLE_S if self._count_left_rows() else None

    def finish(self) -> list[bytes]:
        """End the display. Return all rows that are not blank as lines."""
        rows, self._rows = self._rows, [_Row()]
        self._row = self._column = self._top = self._rows_left = 0
        return [row.render() for row in rows if not row.is_blank()]

    def rows(self, columns: int | None = None) -> list[bytes]:
        """Return the current rows, each at most ``columns`` wide."""
        if columns is not None:
            columns = max(0, columns)  # a prefix may be wider than the terminal
        shown = [row.render(columns) for row in self._rows]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    @property
    def is_complete(self) -> bool:
        """Whether the cursor is visible and at the start of a row, with no text below."""
        if self._is_cursor_hidden or self._column or self._held:
            return False
        return all(row.is_blank() for row in self._rows[self._row :])

    @property
    def is_over(self) -> bool:
        """Whether no text is left that the program could overwrite."""
        return self._row == 0 and self.is_complete

    def _count_final_rows(self, now: float) -> int:
        if self._redraws_from_top:
            return max(0, min(self._top, self._row - self._max_moved_up))
        count = self._count_left_rows()
        for index in range(count):
            if self._rows[index].left_s + SETTLE_S > now:
                return index
        return count

    def _count_left_rows(self) -> int:
        if self._redraws_from_top or (self._is_cursor_hidden and self._lines_time_s < _STALE_S):
            return 0
        count = min(self._row, len(self._rows) - 1 - self._max_moved_up)
        for index in range(self._rows_left, count):
            if self._rows[index].is_bar:
                return index
        return max(0, count)

    def _remove_rows(self, count: int) -> list[bytes]:
        if not count:
            return []
        done = [row.render() for row in self._rows[:count]]
        del self._rows[:count]
        self._row = max(0, self._row - count)
        self._top = max(0, self._top - count)
        self._rows_left = max(0, self._rows_left - count)
        if self._move_up_from is not None:
            self._move_up_from = max(0, self._move_up_from - count)
        if not self._rows:
            self._rows.append(_Row())
        return done

    def _newline(self, now: float) -> None:
        self._end_move_up()
        self._move_down(1, now)
        self._column = 0

    def _move_down(self, count: int, now: float) -> None:
        row = self._rows[self._row]
        row.left_s = now
        # Before the first move up, several bars may be rows of one display.
        if self._has_written and (self._max_moved_up or not row.is_bar):
            self._rows_left = max(self._rows_left, self._row)
        self._has_written = self._has_returned = False
        self._lines_time_s += min(now - self._left_s, _PAUSE_S)
        self._left_s = now
        if self._lines_time_s >= _STALE_S:
            self._max_moved_up = 0
            self._redraws_from_top = False
        self._row += count
        while len(self._rows) <= self._row:
            self._rows.append(_Row())

    def _move_up(self, count: int) -> None:
        if self._move_up_from is None:
            self._move_up_from = self._row
            if not self._is_cursor_hidden:
                self._redraws_from_top = self._column == 0 and self._rows[self._row].is_blank()
        self._row = max(0, self._row - count)
        self._has_written = False

    def _end_move_up(self) -> None:
        if self._move_up_from is None:
            return
        self._max_moved_up = max(self._max_moved_up, self._move_up_from - self._row)
        self._move_up_from = None
        self._top = self._row
        self._rows_left = min(self._rows_left, self._row)
        self._rows[self._row].is_bar = True
        self._lines_time_s = 0.0
        self._redraws_from_top = self._redraws_from_top or self._is_cursor_hidden

    def _write_text(self, text: str) -> None:
        self._end_move_up()
        first = text[0]
        if first == "\b":
            self._column = max(0, self._column - 1)
            return
        if first == "\t":
            self._column = max(
                self._column, min(self._column + 8 - self._column % 8, _MAX_ROW_CELLS)
            )
            return
        code = ord(first)
        if code < 0x20:
            text = chr(0x2400 + code)
        elif _DELETE <= code < 0xA0:
            text = "\ufffd"
        text = text[: max(0, _MAX_ROW_CELLS - self._column)]
        cells = list(text) if text.isascii() else self._split_cells(text)
        row = self._rows[self._row]
        row.write(self._column, cells, self._style)
        row.is_bar = row.is_bar or self._has_returned
        self._column += len(cells)
        if not text.isspace():
            if self._has_written and self._has_returned:
                self._rows_left = max(self._rows_left, self._row)
            self._has_written = True
            self._has_returned = False

    def _split_cells(self, text: str) -> list[str]:
        """Return one entry per column. A combining character is added to the column before."""
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

    def _apply_control(self, private: str, parameters: str, final: str, now: float) -> None:
        if private:
            if private == "?" and parameters == "25" and final in "lh":
                self._is_cursor_hidden = final == "l"
                self._redraws_from_top = False
                self._lines_time_s = 0.0
                if not self._is_cursor_hidden:  # the program has finished its display
                    self._max_moved_up = 0
                    self._rows_left = max(self._rows_left, self._row)
            return
        if final == "m":
            self._set_colour(parameters)
            return
        count = min(
            int(parameters) if parameters.isdecimal() and len(parameters) <= 4 else 0,
            _MAX_ROW_CELLS,
        )
        row = self._rows[self._row]
        match final:
            case "A":
                self._move_up(count or 1)
            case "F":
                self._move_up(count or 1)
                self._column = 0
                self._has_returned = True
            case "B" | "E":
                self._end_move_up()
                self._move_down(min(count or 1, MAX_ROWS - 1 - self._row), now)
                self._column = 0 if final == "E" else self._column
            case "C":
                self._column = max(self._column, min(self._column + (count or 1), _MAX_COLUMNS))
            case "D":
                self._column = max(0, self._column - (count or 1))
            case "G":
                self._column = min(max(0, count - 1), _MAX_COLUMNS)
            case "K" if count == 0:
                row.erase(self._column, None)
            case "K" if count == 1:
                row.erase(0, self._column + 1)
            case "K":
                row.erase(0, None)
            case "J" if count == 0:
                row.erase(self._column, None)
                del self._rows[self._row + 1 :]
            case _:
                pass  # a program cannot clear the screen or move to other lines

    def _set_colour(self, parameters: str) -> None:
        if not parameters.strip("0;:"):
            self._style = ""
        elif len(parameters) < _MAX_STYLE // 2:
            style = f"\x1b[{parameters}m"
            kept = "" if parameters.startswith(("0;", ";")) else self._style
            while len(kept) + len(style) > _MAX_STYLE:
                kept = kept[kept.index("m") + 1 :]
            self._style = kept if kept.endswith(style) else kept + style


def _drop_old_states(text: str) -> str:
    """Drop states that were overwritten many carriage returns ago."""
    lines = text.split("\n")
    for index, line in enumerate(lines):
        if line.count("\r") > _MAX_STATES:
            lines[index] = "\r" + "\r".join(line.rsplit("\r", _MAX_STATES)[1:])
    return "\n".join(lines)
