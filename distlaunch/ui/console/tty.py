"""Layer ui.console: the writer of a terminal: it never refuses, skips lines when stopped, and keeps a status line.

The status line is the last line of the screen: cleared before output, drawn again after it, both in the writer's
thread and in one write with the output, so that nothing tears. While the cursor stands inside an unfinished line (a
prompt, a progress bar) it is not shown.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from distlaunch.core.model.text import printable
from distlaunch.ui.console.ranks import RESET
from distlaunch.ui.console.status import SEPARATOR
from distlaunch.ui.console.writer import Writer

BUFFER = 1 << 20
"""Pending bytes at which lines are skipped: a person reads what is new, not what is a megabyte old."""
_OWN_EXTRA = 1 << 20
_CLEAR = b"\r\x1b[K"
_DIM = b"\x1b[2m"
_WIDTH = 80


class TerminalWriter(Writer):
    """A writer that drops instead of saying no, and tells how many lines it dropped."""

    def __init__(self, fd: int, *, skipped: Callable[[int], bytes], colour: bool, high_water: int = BUFFER) -> None:
        super().__init__(fd, high_water=high_water)
        self._describe_skipped = skipped
        self._colour = colour
        self._skipping = False
        self._skipped = 0
        self._queued_newline = True
        self._written_newline = True
        self._status: str | None = None
        self._redraw = False
        self._drawn = False

    def set_status(self, text: str | None) -> None:
        """Show this as the last line of the screen, or nothing."""
        with self._cond:
            if text == self._status or self._dead or self._closing:
                return
            self._status = text
            self._redraw = True
            self._wake()

    def has_room(self) -> bool:
        """Say yes always: a terminal skips lines, it does not slow the job."""
        return True

    def begin_close(self) -> None:
        """Clear the status line too."""
        self.set_status(None)
        super().begin_close()

    def _put(self, data: bytes, *, must: bool) -> bool:
        if self._dead or self._closing:
            self.lost += len(data)
            return False
        if must:
            self._tell_skipped()
        room = 0 if self._skipping else self._high_water + (_OWN_EXTRA if must else 0) - self._pending
        if len(data) <= room:
            self._queue(data)
            return not self._dead
        cut = data.rfind(b"\n", 0, max(0, room)) + 1
        self._skipping = True
        self._skipped += data.count(b"\n", cut)
        if cut:
            self._queue(data[:cut])
        return False

    def _queue(self, data: bytes) -> None:
        self._queued_newline = data.endswith(b"\n")
        self._append(data)

    def _tell_skipped(self) -> None:
        if not self._skipping:
            return
        self._skipping = False
        note = self._describe_skipped(self._skipped) if self._skipped else b""
        self._skipped = 0
        if not self._queued_newline:
            note = b"\n" + note
        if note:
            self._queue(note)

    def _drained(self) -> None:
        if self._skipping and self._pending <= self._high_water // 2:
            self._tell_skipped()

    def _has_work(self) -> bool:
        return self._redraw or bool(self._chunks)

    def _frame(self, batch: bytes) -> bytes:
        parts = [_CLEAR] if self._drawn else []
        if batch:
            parts.append(batch)
            self._written_newline = batch.endswith(b"\n")
        with self._cond:
            self._redraw = False
            status = self._status
            self._drawn = status is not None and self._written_newline and not self._chunks
        if self._drawn and status is not None:
            text = self._fitted(status)
            parts.append(_DIM + text + RESET if self._colour else text)
        return b"".join(parts)

    def _fitted(self, text: str) -> bytes:
        """Cut a text to the terminal's width: whole parts from the end, and only the first one within."""
        try:
            width = os.get_terminal_size(self._fd).columns or _WIDTH
        except OSError:
            width = _WIDTH
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
    """Count screen columns, wide characters as two."""
    return sum(2 if char >= "\u1100" and char != "…" else 1 for char in text)
