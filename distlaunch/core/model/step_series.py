"""Encode and decode the file with the series of steps of each rank. Standard library only.

``docs/reference/files.md`` describes it. A block has at most one report of each rank.
``merge_blocks`` halves the number of blocks, because ranks may report once a second for days.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence

MAGIC = b"DLSTEPS1"
"""First bytes of the file."""
_BLOCK = b"DLSB"
_HEAD = struct.Struct("<4sIIId")
_COLUMNS = "Ifdfd"
"""Kinds of the columns, as in ``struct``: rank, time after the first, step, loss, samples."""
_WIDTHS = tuple(struct.calcsize(f"<{kind}") for kind in _COLUMNS)
_ROW = sum(_WIDTHS)
_MOST_ROWS = 1 << 24
_LARGEST_FLOAT = 3.4028234e38
_NONE = math.nan


Row = tuple[int, float, float | None, float | None, float | None]
"""What a rank has reported at one time: rank, time when the launcher received it (seconds since
1970), step, loss, samples."""


def pack_block(attempt: int, rows: Sequence[Row]) -> bytes:
    """Return a block of the file. ``rows`` are not empty, and ordered by rank."""
    count = len(rows)
    ranks, times, steps, losses, samples = zip(*rows, strict=True)
    first: float = min(times)
    columns = (
        ranks,
        [time - first for time in times],
        [_NONE if step is None else step for step in steps],
        [_NONE if loss is None else _clamped_to_float(loss) for loss in losses],
        [_NONE if each is None else each for each in samples],
    )
    data = b"".join(
        struct.pack(f"<{count}{kind}", *column)
        for kind, column in zip(_COLUMNS, columns, strict=True)
    )
    return _HEAD.pack(_BLOCK, _checksum(data), attempt, count, first) + data


def split_blocks(data: bytes) -> Iterator[bytes]:
    """Yield the blocks of a file, up to the first incomplete one."""
    if not data.startswith(MAGIC):
        return
    at = len(MAGIC)
    while at + _HEAD.size <= len(data):
        mark, checksum, _, count, _ = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + count * _ROW
        if mark != _BLOCK or not 0 < count <= _MOST_ROWS or end > len(data):
            return
        block = data[at:end]
        if _checksum(block[_HEAD.size :]) != checksum:
            return
        yield block
        at = end


def unpack_block(block: bytes) -> tuple[int, Iterable[Row]]:
    """Return the attempt of a block and its reports."""
    return _attempt_of(block), _unpack_rows(block)


def merge_blocks(blocks: Sequence[bytes]) -> list[bytes]:
    """Merge each two blocks that follow each other in one attempt. The later report of a rank
    stays.

    The first block of an attempt stays as it is, because it tells when the steps began.
    """
    merged: list[bytes] = []
    pending: bytes | None = None
    attempt: int | None = None
    for block in blocks:
        if _attempt_of(block) != attempt:
            merged += [block] if pending is None else [pending, block]
            pending, attempt = None, _attempt_of(block)
        elif pending is None:
            pending = block
        else:
            merged.append(_merge(pending, block))
            pending = None
    return merged if pending is None else [*merged, pending]


def _merge(earlier: bytes, later: bytes) -> bytes:
    if _packed_ranks(earlier) == _packed_ranks(later):
        return later
    rows = {row[0]: row for row in (*_unpack_rows(earlier), *_unpack_rows(later))}
    return pack_block(_attempt_of(later), [rows[rank] for rank in sorted(rows)])


def _attempt_of(block: bytes) -> int:
    attempt: int = _HEAD.unpack_from(block)[2]
    return attempt


def _packed_ranks(block: bytes) -> bytes:
    count = _HEAD.unpack_from(block)[3]
    return block[_HEAD.size : _HEAD.size + count * _WIDTHS[0]]


def _unpack_rows(block: bytes) -> Iterable[Row]:
    _, _, _, count, first = _HEAD.unpack_from(block)
    columns, at = [], _HEAD.size
    for kind, width in zip(_COLUMNS, _WIDTHS, strict=True):
        columns.append(struct.unpack_from(f"<{count}{kind}", block, at))
        at += count * width
    for rank, offset, step, loss, samples in zip(*columns, strict=True):
        yield rank, first + offset, _none_if_nan(step), _none_if_nan(loss), _none_if_nan(samples)


def _none_if_nan(number: float) -> float | None:
    return None if math.isnan(number) else number


def _clamped_to_float(number: float) -> float:
    """Return a number within the bounds of four bytes."""
    return max(-_LARGEST_FLOAT, min(number, _LARGEST_FLOAT))


def _checksum(data: bytes) -> int:
    from binascii import crc32

    return crc32(data)
