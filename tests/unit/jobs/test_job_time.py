"""What the time of a job went to: start, steps, lost steps, recovery, waiting for nodes."""

from __future__ import annotations

import pytest

from distlaunch.jobs.report.job_time import (
    AttemptTime,
    SavedStep,
    TimeUse,
    divide_time,
    find_waits,
)


def attempt(number: int, begin: float, end: float, *points: tuple[float, float]) -> AttemptTime:
    return AttemptTime(number=number, begin=begin, end=end, points=points)


def divided(*attempts, end: float, saved=(), waits=(), failed: bool = False):
    return divide_time(
        begin=0.0,
        end=end,
        attempts=attempts,
        checkpoints=[SavedStep(time=time, step=step) for time, step in saved],
        waits=waits,
        needs_checkpoint=failed,
    )


def uses(division) -> list[tuple[TimeUse, float, float]]:
    return [(span.use, span.begin, span.end) for span in division.spans]


def test_a_job_without_failures_has_start_steps_and_end():
    division = divided(attempt(0, 2, 100, (10, 0), (90, 80)), end=100)
    assert uses(division) == [
        (TimeUse.START, 0, 10),
        (TimeUse.STEPS, 10, 90),
        (TimeUse.END, 90, 100),
    ]
    assert division.goodput == pytest.approx(0.8)
    assert division.lost_steps == 0


def test_steps_after_the_checkpoint_of_the_restart_are_lost():
    division = divided(
        attempt(0, 0, 70, (10, 0), (60, 50)),
        attempt(1, 75, 140, (80, 40), (140, 100)),
        end=140,
        saved=[(31, 20), (51, 40)],
    )
    assert uses(division) == [
        (TimeUse.START, 0, 10),
        (TimeUse.STEPS, 10, 49),
        (TimeUse.LOST, 49, 60),
        (TimeUse.RECOVERY, 60, 80),
        (TimeUse.STEPS, 80, 140),
    ]
    assert division.lost_steps == 11, "40 to 50"
    assert sum(span.seconds for span in division.spans) == 140


def test_a_first_report_that_comes_late_does_not_hide_the_checkpoint():
    reports = (attempt(0, 0, 70, (10, 0), (60, 50)), attempt(1, 75, 140, (80, 43), (140, 100)))
    assert divided(*reports, end=140, saved=[(51, 40)]).lost_steps == 11
    assert divided(*reports, end=140).lost_steps == 8, "no checkpoint is known"


def test_a_checkpoint_that_is_newer_than_the_one_resumed_does_not_count():
    division = divided(
        attempt(0, 0, 70, (10, 0), (60, 50)),
        attempt(1, 75, 140, (80, 20), (140, 100)),
        end=140,
        saved=[(31, 20), (51, 40)],
    )
    assert division.lost_steps == 31, "the checkpoint after 40 steps was damaged"


def test_a_restart_from_the_beginning_loses_all():
    division = divided(
        attempt(0, 0, 70, (10, 0), (60, 50)), attempt(1, 75, 140, (80, 0), (140, 60)), end=140
    )
    assert division.total(TimeUse.LOST) == 50
    assert division.total(TimeUse.STEPS) == 60


def test_a_failed_job_loses_the_steps_after_its_newest_checkpoint():
    reports = attempt(0, 0, 70, (10, 0), (60, 50))
    division = divided(reports, end=70, saved=[(31, 20)], failed=True)
    assert division.total(TimeUse.STEPS) == 19
    assert division.total(TimeUse.LOST) == 31
    unknown = divided(reports, end=70, failed=True)
    assert unknown.total(TimeUse.LOST) == 0
    assert unknown.lost_steps is None, "without a checkpoint nobody knows"


def test_attempts_that_fail_before_a_step_are_recovery_after_the_first():
    division = divided(
        attempt(0, 1, 5), attempt(1, 8, 9), attempt(2, 12, 40, (20, 0), (40, 20)), end=40
    )
    assert uses(division) == [
        (TimeUse.START, 0, 5),
        (TimeUse.RECOVERY, 5, 20),
        (TimeUse.STEPS, 20, 40),
    ]


def test_a_job_without_steps_has_no_goodput():
    division = divided(attempt(0, 2, 50), attempt(1, 55, 100), end=101)
    assert division.goodput is None
    assert division.lost_steps is None
    assert uses(division) == [
        (TimeUse.START, 0, 2),
        (TimeUse.UNKNOWN, 2, 50),
        (TimeUse.RECOVERY, 50, 55),
        (TimeUse.UNKNOWN, 55, 101),
    ]


def test_steps_that_go_back_are_all_counted_and_lost_steps_are_not_known():
    division = divided(
        attempt(0, 0, 30, (5, 0), (15, 100), (20, 0), (30, 90)),
        attempt(1, 31, 60, (35, 50), (60, 90)),
        end=60,
    )
    assert division.lost_steps is None
    assert division.total(TimeUse.LOST) == 0


def test_waits_are_cut_out_of_start_and_recovery_and_never_out_of_steps():
    division = divided(
        attempt(0, 9, 70, (10, 0), (60, 50)),
        attempt(1, 95, 140, (100, 51), (140, 90)),
        end=140,
        waits=[(0, 8), (55, 90)],
    )
    assert uses(division) == [
        (TimeUse.WAITING, 0, 8),
        (TimeUse.START, 8, 10),
        (TimeUse.STEPS, 10, 60),
        (TimeUse.WAITING, 60, 90),
        (TimeUse.RECOVERY, 90, 100),
        (TimeUse.STEPS, 100, 140),
    ]


def test_waits_are_from_the_start_or_the_end_of_an_attempt_until_the_nodes_are_known():
    events = [
        {"time": 0.0, "type": "job_started"},
        {"time": 5.0, "type": "composed"},
        {"time": 6.0, "type": "attempt_started"},
        {"time": 50.0, "type": "failure"},
        {"time": 50.0, "type": "restarting", "delay_s": 10.0},
        {"time": 80.0, "type": "composed"},
        {"time": 90.0, "type": "reforming"},
    ]
    assert find_waits(events, 100.0) == [(0.0, 5.0), (60.0, 80.0), (90.0, 100.0)]
    assert find_waits([event for event in events if event["type"] != "composed"], 100.0) == [], (
        "a job of one machine waits for no node"
    )


def test_nothing_at_all_is_divided():
    assert divided(end=0.0).spans == ()
    assert divided(end=0.0).goodput is None
