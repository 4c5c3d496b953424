from __future__ import annotations

import pytest

from distlaunch.core.agent.workers.output_tail import LEFT_OUT, RECENT_S, OutputTail

MOST = 65536
RAISED = b"""Traceback (most recent call last):
  File "/home/user/train.py", line 30, in <module>
    main()
ValueError: loss is nan
"""
CHUNKS = (1, 7, 4096, 65536, 1 << 18)


def tail_of(data: bytes, size: int, *, most: int = MOST, age_s: float = 0.0) -> bytes:
    tail = OutputTail(most)
    for at in range(0, len(data), size):
        tail.add(data[at : at + size], 5.0)
    return tail.text(5.0 + age_s)


@pytest.mark.parametrize("size", CHUNKS)
def test_output_that_fits_is_kept_whole(size):
    data = RAISED * 20
    assert tail_of(data, size) == data


@pytest.mark.parametrize("size", CHUNKS[1:])
@pytest.mark.parametrize("above", [b"", b"Exception in thread Thread-1 (fill):\n"])
def test_a_traceback_before_much_output_is_kept_with_the_line_above(size, above):
    data = b"step 1\n" * 50000 + above + RAISED + b"slot is drained\n" * 20000
    kept = tail_of(data, size)
    assert len(kept) <= MOST
    assert above + RAISED in kept
    assert LEFT_OUT.strip() in kept.splitlines()
    assert kept.endswith(b"slot is drained\n" * 1000)


@pytest.mark.parametrize("size", CHUNKS[1:])
def test_a_traceback_that_is_not_recent_is_not_kept(size):
    data = RAISED + b"step 1\n" * 50000
    kept = tail_of(data, size, age_s=RECENT_S + 1)
    assert b"Traceback" not in kept
    assert kept.endswith(b"step 1\n" * 1000)


@pytest.mark.parametrize("size", CHUNKS[1:])
def test_frames_and_both_ends_of_a_long_message_are_kept(size):
    message = b"bad record: " + b"x" * 100_000 + b" the price is negative\n"
    kept = tail_of(b"step 1\n" * 9 + RAISED[:-12] + message, size)
    assert len(kept) <= MOST
    [last] = [line for line in kept.splitlines() if line.endswith(b"the price is negative")]
    assert last.startswith(b"ValueError: bad record: xxx")
    assert LEFT_OUT in last
    assert RAISED[:-24] in kept


@pytest.mark.parametrize("size", CHUNKS[1:])
def test_both_ends_of_a_long_line_without_a_traceback_are_kept(size):
    kept = tail_of(b"step 1\n" + b"refused: " + b"y" * 100_000 + b" lr is 0\n", size)
    assert len(kept) <= MOST
    assert kept.startswith(b"refused: yyy")
    assert kept.endswith(b"yyy lr is 0\n")
    assert len(kept.splitlines()) == 1


@pytest.mark.parametrize("size", [1, 5, 33, 34, 35])
def test_a_header_in_two_chunks_is_a_traceback(size):
    tail = OutputTail(MOST)
    data = b"step 1\n" + RAISED
    for number, at in enumerate(range(0, len(data), size)):
        tail.add(data[at : at + size], float(number))
    ends = data.index(b"last)") + len(b"last)") - 1
    assert tail.traceback_at == ends // size


def test_a_short_tail_is_kept_within_its_size():
    kept = tail_of(b"epoch 1\n" * 3000 + RAISED + b"saved\n" * 3000, 100, most=8192)
    assert len(kept) <= 8192
    assert RAISED in kept
