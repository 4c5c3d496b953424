"""Encode and decode the index of times of an attempt's log files.

Log files hold only the ranks' output. The index says when it came, to the second: a record for each
file's first byte, and for the next byte that comes a second or more after the last record. Readers
merge the files by it. Standard library only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from distlaunch.core.model.record import Record

STEP_S = 1.0
_FORMAT = struct.Struct("<dIIQ")
MARK_BYTES = _FORMAT.size


class Mark(Record):
    """From this byte on, a file holds output of this time."""

    time: float
    """Seconds since 1970."""
    rank: int
    stream: int
    """STDOUT or STDERR; 0 for a file with both."""
    offset: int

    def pack(self) -> bytes:
        """Return the record for the index."""
        return _FORMAT.pack(self.time, self.rank, self.stream, self.offset)


def unpack_marks(data: bytes) -> Iterator[Mark]:
    """Yield the marks of an index, without a record that is cut at the end."""
    whole = len(data) - len(data) % _FORMAT.size
    for time, rank, stream, offset in _FORMAT.iter_unpack(data[:whole]):
        yield Mark(time=time, rank=rank, stream=stream, offset=offset)
