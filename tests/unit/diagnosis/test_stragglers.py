from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.diagnosis.stragglers import (
    StragglerReason,
    are_equal,
    find_stragglers,
    slowest_rank,
)


def times(*step_times: float, steps: float = 40.0) -> dict[int, tuple[float, float]]:
    return {rank: (step_s, steps) for rank, step_s in enumerate(step_times)}


def of(*step_times: float) -> list[int]:
    return sorted(find_stragglers(times(*step_times)))


def test_a_rank_far_above_the_median_is_one():
    found = find_stragglers(times(1.0, 1.1, 0.9, 2.0))
    assert list(found) == [3]
    assert found[3].reason is StragglerReason.STEP_TIME
    assert (found[3].step_s, found[3].median_s) == (2.0, pytest.approx(1.05))
    assert found[3].words


@pytest.mark.parametrize(
    "step_times",
    [
        (1.0, 1.0, 1.0, 1.0),
        (1.0, 1.001, 1.002, 1.19),  # all within what differs between reports
        (0.452, 0.402, 0.402),  # ranks that wait for each other, by reports of one second
        (1.0, 2.0, 3.0, 4.0),  # widely spread
        (1.0, 5.0),  # one of two
        (0.0, 0.0, 1.0),
        (),
    ],
)
def test_ranks_that_are_as_slow_as_the_others_are_none(step_times):
    assert of(*step_times) == []


def test_ranks_with_equal_step_times_do_not_hide_one():
    assert of(*[0.5] * 511, 0.7) == [511]


def test_few_steps_and_short_delays_are_not_judged():
    assert list(find_stragglers(times(1.0, 1.0, 2.0, steps=20))) == [2]
    assert find_stragglers(times(1.0, 1.0, 2.0, steps=19)) == {}
    assert find_stragglers(times(0.01, 0.01, 0.02, steps=100)) == {}, "1 s behind"
    assert list(find_stragglers(times(0.01, 0.01, 0.02, steps=500))) == [2]
    assert slowest_rank(times(1.0, 2.0, steps=19)) is None
    assert not are_equal(times(1.0, 1.0, steps=19))


@pytest.mark.parametrize(
    ("step_times", "rank"),
    [
        ((1.0, 1.3), 1),
        ((1.0, 1.1), None),
        ((1.0, 2.0, 3.0, 4.0), 3),
        ((1.0, 2.0, 2.0), None),  # one that is fast is no slow one
        ((0.0, 0.0), None),
    ],
)
def test_the_slowest_rank_differs_from_the_others(step_times, rank):
    assert slowest_rank(times(*step_times)) == rank


def test_ranks_that_wait_for_each_other_have_no_slowest_one():
    assert are_equal(times(0.501, 0.5, 0.52, 0.499))
    assert are_equal(times(0.452, 0.402, 0.402))
    assert not are_equal(times(1.0, 2.0, 2.0))
    assert not are_equal(times(1.0))
    assert slowest_rank(times(1.0)) is None
    assert slowest_rank({}) is None


@given(st.lists(st.floats(min_value=1e-6, max_value=1e6), max_size=50))
def test_never_more_than_half_of_the_ranks(step_times):
    assert len(of(*step_times)) <= len(step_times) // 2
