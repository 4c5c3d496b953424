from __future__ import annotations

from itertools import pairwise

import pytest

from distlaunch.toolkit.checkpoint.checkpoint import ASK_S, MOST_STEPS_BETWEEN, RequestSchedule


def trained(asking, first, last, step_s, now_s=0.0):
    """Make steps. Return those after which a request was read."""
    asked = []
    for steps in range(first, last):
        now_s += step_s
        if asking.is_due(steps):
            asking.answered(steps, now_s, asking.step_us(steps, now_s))
            asked.append(steps)
    return asked


def test_slow_steps_ask_each_time():
    assert trained(RequestSchedule(0.0), 1, 8, ASK_S) == [1, 2, 3, 4, 5, 6, 7]


def test_fast_steps_ask_about_every_half_second_and_get_there_by_doubling():
    asked = trained(RequestSchedule(0.0), 1, 400, 0.01)
    assert asked[:5] == [1, 3, 7, 15, 31]
    assert {later - earlier for earlier, later in pairwise(asked[7:])} == {50}


def test_the_fastest_steps_ask_often_enough_even_so():
    asked = trained(RequestSchedule(0.0), 1, 5000, 1e-6)
    assert max(later - earlier for earlier, later in pairwise(asked)) == MOST_STEPS_BETWEEN


@pytest.mark.parametrize("restarts", [True, False])
def test_after_going_back_the_next_step_asks(restarts):
    asking = RequestSchedule(0.0)
    trained(asking, 1, 3000, 0.0001)
    if restarts:
        asking.restart(1.0)
    assert trained(asking, 101, 110, 0.0001, 1.0)[:1] == [101]
