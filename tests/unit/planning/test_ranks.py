from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.planning.worker_counts import cross_ranks, cross_sizes, pack, spread

SLOTS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("slots", "total", "packed", "dealt"),
    [
        ((4,), 2, [2], [2]),
        ((2, 2), 4, [2, 2], [2, 2]),
        ((2, 2), 3, [2, 1], [2, 1]),
        ((4, 4), 4, [4, 0], [2, 2]),
        ((4, 4), 5, [4, 1], [3, 2]),
        ((3, 1, 2), 6, [3, 1, 2], [3, 1, 2]),
        ((3, 1, 2), 5, [3, 1, 1], [2, 1, 2]),
        ((3, 1, 2), 4, [3, 1, 0], [2, 1, 1]),
        ((1, 8), 2, [1, 1], [1, 1]),
        ((1, 8), 7, [1, 6], [1, 6]),
        ((8, 8, 8), 2, [2, 0, 0], [1, 1, 0]),
    ],
)
def test_workers_are_packed_or_dealt_in_turn(slots, total, packed, dealt):
    assert pack(total, slots) == packed
    assert spread(total, slots) == dealt


@given(slots=SLOTS, share=st.floats(0, 1))
def test_all_are_placed_and_none_beyond_the_slots(slots, share):
    total = round(sum(slots) * share)
    for counts in (pack(total, slots), spread(total, slots)):
        assert sum(counts) == total
        assert all(0 <= count <= own for count, own in zip(counts, slots, strict=True))


@given(slots=SLOTS, share=st.floats(0, 1))
def test_dealing_in_turn_is_what_one_worker_at_a_time_gives(slots, share):
    total = round(sum(slots) * share)
    counts = [0] * len(slots)
    while sum(counts) < total:
        for place, own in enumerate(slots):
            if counts[place] < own and sum(counts) < total:
                counts[place] += 1
    assert spread(total, slots) == counts


# Expected values: Horovod's documentation of cross_rank and cross_size (one communicator for each
# local rank).
@pytest.mark.parametrize(
    ("slots", "sizes", "ranks"),
    [
        ((2, 2), (2, 2), [(0, 0), (1, 1)]),
        ((3, 1, 2), (3, 2, 1), [(0, 0, 0), (1,), (2, 1)]),
        ((1, 3, 2), (3, 2, 1), [(0,), (1, 0, 0), (2, 1)]),
        ((4,), (1, 1, 1, 1), [(0, 0, 0, 0)]),
        ((1, 1, 1), (3,), [(0,), (1,), (2,)]),
        ((), (), []),
    ],
)
def test_cross_ranks_count_the_nodes_that_have_this_local_rank(slots, sizes, ranks):
    assert cross_sizes(slots) == sizes
    assert cross_ranks(slots) == ranks


@given(slots=SLOTS)
def test_cross_ranks_of_one_local_rank_run_without_a_gap(slots):
    sizes, ranks = cross_sizes(slots), cross_ranks(slots)
    for local_rank, size in enumerate(sizes):
        assert [own[local_rank] for own in ranks if len(own) > local_rank] == list(range(size))
