"""Write output to a terminal without blocking the job, and draw live rows at the bottom.

If the terminal is slow, lines are dropped and counted. The live rows are progress bars and, below
them, the status line. The writer's thread erases them before output and draws them again
afterwards, in one write, so that nothing flickers. They are not drawn while the cursor is in an
unfinished line (a prompt).
"""

from __future__ import annotations

import os
from collections.abc import Callable

from distlaunch.console.prefixes import RESET
from distlaunch.console.status_line import SEPARATOR
from distlaunch.console.writer import Writer
from distlaunch.core.model.text import printable

BUFFER = 1 << 20
"""With more pending bytes, lines are skipped, so that the user sees recent output."""
_OWN_EXTRA = 1 << 20
_ERASE_ROW = b"\x1b[K"
_ERASE_BELOW = b"\x1b[J"
_DIM = b"\x1b[2m"
_WIDTH, _HEIGHT = 80, 24
_ROOM_FOR_LINES = 6
"""Rows of the screen that live rows leave to lines and the status line."""


class TerminalWriter(Writer):
    """Drops lines if the terminal is slow, and reports their number."""

    def __init__(
        self, fd: int, *, skipped: Callable[[int], bytes], colour: bool, high_water: int = BUFFER
    ) -> None:
        super().__init__(fd, high_water=high_water, dropped=skipped)
        self._describe_skipped = skipped
        self._colour = colour
        self._skipping = False
        self._skipped = 0
        self._queued_newline = True
        self._written_newline = True
        self._status: str | None = None
        self._bars: tuple[bytes, ...] = ()
        self._redraw = False
        self._drawn_rows = 0
        self._hidden = False

    def set_status(self, text: str | None) -> None:
        """Show ``text`` in the last row of the screen, or remove the row."""
        with self._cond:
            if text == self._status or self._dead or self._closing:
                return
            self._status = text
            self._redraw = True
            self._wake()

    def set_bars(self, rows: tuple[bytes, ...]) -> None:
        """Show rows above the status line. The caller has made none of them wider than the
        screen."""
        with self._cond:
            if rows == self._bars or self._dead or self._closing:
                return
            self._bars = rows
            self._redraw = True
            self._wake()

    def hide_live_rows(self, *, hidden: bool) -> None:
        """Hide the live rows, or show them again."""
        with self._cond:
            if hidden != self._hidden and not self._dead and not self._closing:
                self._hidden = hidden
                self._redraw = True
                self._wake()

    @property
    def columns(self) -> int:
        """The width of the screen in columns."""
        return self._screen_size()[0]

    def has_room(self) -> bool:
        """Return True: the writer drops lines instead of slowing the job down."""
        return True

    def begin_close(self) -> None:
        """Clear the live rows, and accept no more bytes."""
        self.set_status(None)
        self.set_bars(())
        super().begin_close()

    def _put(self, data: bytes, *, must: bool) -> bool:
        """Queue bytes, or skip the lines that do not fit. Return whether all were queued."""
        if self._dead or self._closing:
            self.lost += len(data)
            return False
        if must:
            self._report_skipped()
        room = (
            0 if self._skipping else self._high_water + (_OWN_EXTRA if must else 0) - self._pending
        )
        if len(data) <= room:
            self._queue(data, own=must)
            return not self._dead
        cut = data.rfind(b"\n", 0, max(0, room)) + 1
        self._skipping = True
        self._skipped += data.count(b"\n", cut)
        if cut:
            self._queue(data[:cut])
        return False

    def _queue(self, data: bytes, *, own: bool = False) -> None:
        self._queued_newline = data.endswith(b"\n")
        self._append(data, own=own)

    def _report_skipped(self) -> None:
        """Queue a line with the number of skipped lines, if there are any."""
        if not self._skipping:
            return
        self._skipping = False
        note = self._describe_skipped(self._skipped) if self._skipped else b""
        self._skipped = 0
        if not self._queued_newline:
            note = b"\n" + note
        if note:
            self._queue(note, own=True)

    def _on_drained(self) -> None:
        if self._skipping and self._pending <= self._high_water // 2:
            self._report_skipped()

    def _has_work(self) -> bool:
        return self._redraw or bool(self._chunks)

    def _add_live_rows(self, batch: bytes) -> bytes:
        if batch:
            self._written_newline = batch.endswith(b"\n")
        with self._cond:
            self._redraw = False
            rows: list[bytes] = []
            status, bars = self._status, self._bars
            draw = self._written_newline and not self._chunks and not self._hidden
        if draw and (bars or status is not None):
            columns, height = self._screen_size()
            if bars:
                room = max(1, height - _ROOM_FOR_LINES)
                rows += bars[-room:]
            if status is not None:
                text = self._fit_status(status, columns)
                rows.append(_DIM + text + RESET if self._colour else text)
        up = b"\x1b[%dA" % (self._drawn_rows - 1) if self._drawn_rows > 1 else b""
        start = b"\r" + up if self._drawn_rows else b""
        erase = b"" if not self._drawn_rows else _ERASE_BELOW if up else _ERASE_ROW
        in_place = (
            bool(self._drawn_rows) and not batch and bool(bars) and len(rows) >= self._drawn_rows
        )
        self._drawn_rows = len(rows)
        if in_place:  # overwriting rows does not flicker
            return start + b"\n".join(_ERASE_ROW + row for row in rows)
        return start + erase + batch + b"\n".join(rows)

    def _screen_size(self) -> tuple[int, int]:
        try:
            size = os.get_terminal_size(self._fd)
        except OSError:
            return _WIDTH, _HEIGHT
        return size.columns or _WIDTH, size.lines or _HEIGHT

    @staticmethod
    def _fit_status(text: str, width: int) -> bytes:
        """Return the status line without items that do not fit. Cut the first item if it alone is
        too long."""
        text = printable(text)
        room = width - 1
        while _columns(text) > room and SEPARATOR in text:
            text = text.rpartition(SEPARATOR)[0]
        if _columns(text) > room:
            while text and _columns(text) >= room:
                text = text[:-1]
            text += "…"
        return text.encode()


def _columns(text: str) -> int:
    """Return the width of a text. Wide characters count as two."""
    return sum(2 if char >= "\u1100" and char != "…" else 1 for char in text)
