"""Keep the log file of a rank below ``--log-max-size``. Standard library only.

When a file has reached its limit, bytes in its middle are removed. The first half and the last part
remain, with a notice between them that gives the number of removed bytes. The index of times (time
-> offset) uses the offsets that the bytes would have without the removal.
"""

from __future__ import annotations

import os

from distlaunch.core.model.record import Record

_LAST_BYTES = 16 << 20
"""Most bytes that are moved at once, so that the output of other ranks does not wait for long."""
_BLOCK = 1 << 20
_LINE_BYTES = 4096
_BEGIN, _END = b"\n[distlaunch: ", b" bytes are left out here (--log-max-size)]\n"
_DIGITS = 20
NOTICE_BYTES = len(_BEGIN) + _DIGITS + len(_END)


class Gap(Record):
    """The place where a file has left out bytes."""

    begin: int
    """Offset of the notice: how many bytes the first part has."""
    left_out: int
    """How many bytes are missing there."""

    @property
    def end(self) -> int:
        """The offset of the last part."""
        return self.begin + NOTICE_BYTES

    @property
    def shift(self) -> int:
        """What is added to the offset of a byte of the last part for its place in all that
        the rank has written."""
        return self.left_out - NOTICE_BYTES


def find_gap(descriptor: int, most_bytes: int) -> Gap | None:
    """Return the gap of a file with this limit; None if it has none. Raises OSError."""
    begin = most_bytes // 2
    notice = os.pread(descriptor, NOTICE_BYTES, begin)
    number = notice[len(_BEGIN) : -len(_END)].strip()
    if not (notice.startswith(_BEGIN) and notice.endswith(_END) and number.isdigit()):
        return None
    return Gap(begin=begin, left_out=int(number))


def shorten(descriptor: int, size: int, most_bytes: int, gap: Gap | None) -> tuple[int, Gap]:
    """Leave out the middle of a file, and return its new size and its gap.

    ``descriptor`` must allow reading, and writing at any offset. ``size`` is the size of the file.
    Raises OSError. A process that is killed meanwhile leaves the first and the last part as they
    were.
    """
    begin = most_bytes // 2
    first = gap.end if gap is not None else begin
    start = max(size - min(most_bytes // 4, _LAST_BYTES), first)
    newline = os.pread(descriptor, _LINE_BYTES, start).find(b"\n")
    start += newline + 1  # 0 if there is no newline near
    before = 0 if gap is None else gap.left_out
    shorter = Gap(begin=begin, left_out=before + start - first)
    to = shorter.end
    # The places overlap only if the file is small, and then the blocks are moved in order.
    while block := os.pread(descriptor, _BLOCK, start):
        start += len(block)
        while block:
            written = os.pwrite(descriptor, block, to)
            to += written
            block = block[written:]
    os.pwrite(descriptor, _BEGIN + b"%*d" % (_DIGITS, shorter.left_out) + _END, begin)
    os.ftruncate(descriptor, to)
    return to, shorter
