from __future__ import annotations

import pytest

from distlaunch.transport.cleanup import WaitBudget


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture
def budget(clock):
    return WaitBudget(lambda: clock[0])


def waits(clock, asked):
    def wait(within_s):
        asked.append(within_s)
        clock[0] += within_s

    return wait


def test_a_thousand_silent_connections_cost_no_more_than_one(clock, budget):
    asked = []
    for _ in range(1000):
        budget.spend(waits(clock, asked))
    assert asked[0] == pytest.approx(0.1)
    assert clock[0] - 100.0 < 0.11


def test_unused_bytes_are_left_for_the_next(budget):
    assert budget.spend(lambda within_s: within_s) == budget.spend(lambda within_s: within_s)


def test_it_comes_back(clock, budget):
    asked = []
    budget.spend(waits(clock, asked))
    clock[0] += 60.0
    budget.spend(waits(clock, asked))
    assert asked == [pytest.approx(0.1), pytest.approx(0.1)]


def test_it_never_runs_into_debt(clock, budget):
    def oversleep(_):
        clock[0] += 3.0

    budget.spend(oversleep)
    assert budget.spend(lambda within_s: within_s) == 0.0
