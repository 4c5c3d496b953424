"""The file of steps: what is read back, cut files, and merged blocks."""

from __future__ import annotations

import pytest

from distlaunch.core.model.step_series import (
    MAGIC,
    Report,
    merge_blocks,
    pack_block,
    split_blocks,
    unpack_block,
)

TIME = 1_800_000_000.0


def block(attempt: int, steps: dict[int, float], *, time: float = TIME) -> bytes:
    return pack_block(
        attempt, [(rank, time, step, 0.5, None) for rank, step in sorted(steps.items())]
    )


def reports(blocks) -> list[Report]:
    return [report for each in blocks for report in unpack_block(each)]


def test_reports_are_read_back():
    rows = [(0, TIME, 5, 0.25, 4096.0), (1, TIME + 0.5, None, None, None), (7, TIME, 6.0, 1e300, 1)]
    found = reports([pack_block(3, rows)])
    assert [(each.attempt, each.rank, each.step, each.samples) for each in found] == [
        (3, 0, 5.0, 4096.0),
        (3, 1, None, None),
        (3, 7, 6.0, 1.0),
    ]
    assert [each.time for each in found] == pytest.approx([TIME, TIME + 0.5, TIME])
    assert found[0].loss == 0.25
    assert found[1].loss is None
    assert found[2].loss > 1e38, "the largest number of four bytes"


def test_a_file_is_readable_to_its_last_complete_block_wherever_it_is_cut():
    blocks = [block(0, {0: 1, 1: 1}), block(0, {0: 2, 1: 2}), block(1, {0: 1})]
    data = MAGIC + b"".join(blocks)
    ends = [len(MAGIC) + sum(map(len, blocks[:count])) for count in range(len(blocks) + 1)]
    for size in range(len(data) + 1):
        complete = sum(end <= size for end in ends[1:])
        assert list(split_blocks(data[:size])) == blocks[:complete], size


def test_reading_stops_at_a_block_with_other_content_than_was_written():
    blocks = [block(0, {0: step}) for step in range(3)]
    data = bytearray(MAGIC + b"".join(blocks))
    data[len(MAGIC) + len(blocks[0]) + 30] ^= 1
    assert list(split_blocks(bytes(data))) == blocks[:1]
    assert list(split_blocks(b"something else")) == []


def test_merged_blocks_keep_the_later_report_of_each_rank():
    merged = merge_blocks(
        [
            block(0, {0: 1, 1: 1}, time=TIME),
            block(0, {0: 2, 1: 2}, time=TIME + 1),
            block(0, {0: 3}, time=TIME + 2),
            block(0, {1: 4}, time=TIME + 3),
            block(0, {0: 5}, time=TIME + 4),
            block(1, {0: 1}, time=TIME + 5),
        ]
    )
    assert [
        [(each.attempt, each.rank, each.step) for each in reports([one])] for one in merged
    ] == [
        [(0, 0, 2.0), (0, 1, 2.0)],
        [(0, 0, 3.0), (0, 1, 4.0)],
        [(0, 0, 5.0)],
        [(1, 0, 1.0)],
    ]
