"""Curves of step times and losses, and the ranks that are slow."""

from __future__ import annotations

import pytest

from distlaunch.jobs.report.step_times import (
    POINTS,
    loss_curves,
    mean_step_times,
    slow_ranks,
    step_time_curves,
)


def samples(step_s: float, seconds: int = 100, *, loss: float | None = None, begin: float = 0.0):
    """Return one report a second of a rank with this step time."""
    return [(begin + second, float(int(second / step_s)), loss) for second in range(seconds)]


def test_step_times_are_the_median_of_the_ranks_with_the_outer_tenths_as_a_band():
    series = {(0, rank): samples(0.5 if rank else 2.0) for rank in range(21)}
    [curve] = step_time_curves(series, 0.0, 100.0)
    assert {round(point.middle, 2) for point in curve.points} == {0.5}
    assert all(point.low == pytest.approx(0.5) for point in curve.points)
    assert all(point.high == pytest.approx(0.5) for point in curve.points), "1 of 21 is cut off"
    half = {(0, rank): samples(0.5 if rank < 5 else 2.0) for rank in range(10)}
    [curve] = step_time_curves(half, 0.0, 100.0)
    assert max(point.high for point in curve.points) == pytest.approx(2.0)


def test_a_long_job_has_a_limited_number_of_points_and_a_curve_for_each_attempt():
    series = {(0, 0): samples(0.5, 2000), (1, 0): samples(0.25, 3000, begin=2100.0)}
    curves = step_time_curves(series, 0.0, 5100.0)
    assert [curve.attempt for curve in curves] == [0, 1]
    assert sum(len(curve.points) for curve in curves) <= POINTS + 1
    assert curves[1].points[5].middle == pytest.approx(0.25, rel=0.05)


def test_steps_that_begin_anew_give_no_negative_times():
    one = samples(0.5, 50) + samples(0.5, 50, begin=50.0)
    [curve] = step_time_curves({(0, 0): one}, 0.0, 100.0)
    assert all(point.low > 0 for point in curve.points)
    assert mean_step_times({(0, 0): one}, 0)[0][0] == pytest.approx(0.5, rel=0.05)


def test_reports_without_progress_have_no_step_time():
    assert step_time_curves({(0, 0): [(float(t), 7.0, None) for t in range(50)]}, 0.0, 50.0) == []
    assert step_time_curves({}, 0.0, 0.0) == []


def test_losses_are_the_mean_of_the_ranks_over_the_steps():
    series = {(0, rank): samples(1.0, 500, loss=float(rank)) for rank in range(3)}
    [curve] = loss_curves(series)
    assert {(point.low, point.middle, point.high) for point in curve.points} == {(0.0, 1.0, 2.0)}
    assert len(curve.points) <= POINTS + 1
    assert curve.points[-1].x == 499.0
    assert loss_curves({(0, 0): samples(1.0)}) == []


def test_a_slow_rank_is_above_the_median_by_more_than_three_deviations():
    times = {rank: 0.5 + rank * 0.001 for rank in range(8)} | {8: 0.9}
    found = slow_ranks({(0, rank): samples(step_s) for rank, step_s in times.items()}, 0)
    assert [each.rank for each in found] == [8]
    assert found[0].median_s == pytest.approx(0.5, rel=0.05)
    assert found[0].steps > 100


def test_a_difference_that_reports_cannot_show_is_not_slow():
    series = {(0, rank): samples(0.5) for rank in range(8)} | {(0, 8): samples(0.505)}
    assert slow_ranks(series, 0) == []


def test_the_rule_is_that_of_stragglers_which_needs_three_ranks():
    two = {(0, rank): samples(0.5 + rank) for rank in range(2)}
    assert slow_ranks(two, 0) == []
    assert [each.rank for each in slow_ranks({**two, (0, 2): samples(0.5)}, 0)] == [1]
    near = {(0, rank): samples(0.5, 1000) for rank in range(8)} | {(0, 8): samples(0.52, 1000)}
    assert slow_ranks(near, 0) == [], "4 % above the median"


def test_few_steps_or_one_rank_alone_are_not_judged():
    few = {(0, rank): samples(0.5 if rank else 3.0, 9) for rank in range(4)}
    assert slow_ranks(few, 0) == []
    assert slow_ranks({(0, 0): samples(0.5)}, 0) == []
