from __future__ import annotations

from distlaunch.core.model.step_series import (
    MAGIC,
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


def steps(blocks) -> list[list[tuple[int, int, float | None]]]:
    """Return attempt, rank and step of all reports, block by block."""
    found = [unpack_block(each) for each in blocks]
    return [[(attempt, row[0], row[2]) for row in rows] for attempt, rows in found]


def test_reports_are_read_back():
    rows = [(0, TIME, 5, 0.25, 4096.0), (1, TIME + 0.5, None, None, None), (7, TIME, 6.0, 1e300, 1)]
    attempt, found = unpack_block(pack_block(3, rows))
    first, second, third = found
    assert attempt == 3
    assert first == (0, TIME, 5.0, 0.25, 4096.0)
    assert second == (1, TIME + 0.5, None, None, None)
    assert (third[0], third[2], third[4]) == (7, 6.0, 1.0)
    assert third[3] > 1e38, "the largest number of four bytes"


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
            block(0, {0: 0, 1: 0}),
            block(0, {0: 1, 1: 1}, time=TIME + 1),
            block(0, {0: 2, 1: 2}, time=TIME + 2),
            block(0, {0: 3}, time=TIME + 3),
            block(0, {1: 4}, time=TIME + 4),
            block(0, {0: 5}, time=TIME + 5),
            block(1, {0: 1}, time=TIME + 6),
            block(2, {0: 1}, time=TIME + 7),
        ]
    )
    assert steps(merged) == [
        [(0, 0, 0.0), (0, 1, 0.0)],
        [(0, 0, 2.0), (0, 1, 2.0)],
        [(0, 0, 3.0), (0, 1, 4.0)],
        [(0, 0, 5.0)],
        [(1, 0, 1.0)],
        [(2, 0, 1.0)],
    ], "the first block of each attempt stays"
