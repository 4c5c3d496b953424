"""How long many lost links may hold up a main loop."""

from __future__ import annotations

import pytest

from distlaunch.transport.cleanup import WaitBudget


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture
def patience(clock):
    return WaitBudget(lambda: clock[0])


def waits(clock, asked):
    def wait(within_s):
        asked.append(within_s)
        clock[0] += within_s

    return wait


def test_a_thousand_that_say_nothing_cost_no_more_than_one(clock, patience):
    asked = []
    for _ in range(1000):
        patience.spend(waits(clock, asked))
    assert asked[0] == pytest.approx(0.1)
    assert clock[0] - 100.0 < 0.11


def test_what_was_not_needed_is_left_for_the_next(patience):
    assert patience.spend(lambda within_s: within_s) == patience.spend(lambda within_s: within_s)


def test_it_comes_back(clock, patience):
    asked = []
    patience.spend(waits(clock, asked))
    clock[0] += 60.0
    patience.spend(waits(clock, asked))
    assert asked == [pytest.approx(0.1), pytest.approx(0.1)]


def test_it_never_runs_into_debt(clock, patience):
    def oversleep(_):
        clock[0] += 3.0

    patience.spend(oversleep)
    assert patience.spend(lambda within_s: within_s) == 0.0
