from __future__ import annotations

import pytest

from distlaunch.coordinator.policy.job_progress import Progress
from distlaunch.core.protocol import agent_messages as m


def beat(progress: Progress, now: float, **steps) -> list[dict]:
    """``r3=7``: rank 3 is at step 7."""
    heartbeats = [
        m.Heartbeat(rank=int(name[1:]), values={"step": step}) for name, step in steps.items()
    ]
    return [dict(entry.fields) for entry in progress.on_heartbeats(heartbeats, attempt=0, now=now)]


@pytest.fixture
def progress() -> Progress:
    progress = Progress()
    progress.begin()
    return progress


def test_steps_are_a_range_over_the_ranks_and_speed_is_that_of_the_lowest(progress):
    beat(progress, 10.0, r0=100, r1=110)
    assert progress.summary.steps_per_s is None
    beat(progress, 12.0, r0=120, r1=150)
    assert (progress.summary.step_min, progress.summary.step_max) == (120, 150)
    assert progress.summary.steps_per_s == pytest.approx(10.0)
    assert (progress.summary.ranks, progress.summary.rank) == (2, 0)


def test_speed_is_that_of_the_last_ten_seconds(progress):
    for second in range(100):
        beat(progress, float(second), r0=second * 2)
    for second in range(100, 120):
        beat(progress, float(second), r0=198 + (second - 99) * 7)
    assert progress.summary.steps_per_s == pytest.approx(7.0)


def test_a_step_that_goes_back_begins_the_count_anew(progress):
    beat(progress, 0.0, r0=1000)
    beat(progress, 1.0, r0=1010)
    beat(progress, 2.0, r0=0)
    assert progress.summary.steps_per_s is None
    beat(progress, 4.0, r0=10)
    assert progress.summary.steps_per_s == pytest.approx(5.0)


def test_a_heartbeat_without_a_step_keeps_the_one_before(progress):
    beat(progress, 0.0, r0=5)
    progress.on_heartbeats([m.Heartbeat(rank=0, values={"eval_loss": 0.5})], attempt=0, now=1.0)
    assert progress.summary.values == {"step": 5, "eval_loss": 0.5}


def test_heartbeats_without_any_step_have_no_range(progress):
    progress.on_heartbeats([m.Heartbeat(rank=2, values={"loss": 0.5})], attempt=0, now=1.0)
    assert (progress.summary.step_min, progress.summary.step_max, progress.summary.rank) == (
        None,
        None,
        2,
    )
    assert progress.has_advanced() is None


def test_progress_is_recorded_at_once_then_every_ten_seconds_and_at_the_end(progress):
    recorded = [now for now in range(36) if beat(progress, float(now), r0=now)]
    assert recorded == [0, 10, 20, 30]
    [last] = progress.end(attempt=0, now=35.5)
    assert last.fields == {
        "attempt": 0,
        "ranks": 1,
        "step_min": 35,
        "step_max": 35,
        "steps_per_s": pytest.approx(1.0, rel=0.1),
        "rank": 0,
        "values": {"step": 35},
    }


def test_there_is_no_last_record_if_nothing_came_since_the_one_before(progress):
    beat(progress, 0.0, r0=1)
    assert progress.end(attempt=0, now=1.0) == []


def test_an_attempt_has_gone_on_if_it_came_beyond_all_before(progress):
    assert progress.has_advanced() is None
    beat(progress, 0.0, r0=10)
    assert progress.has_advanced() is True
    progress.begin()
    assert progress.has_advanced() is False, "steps are known of, and none was reported"
    beat(progress, 1.0, r0=10)
    assert progress.has_advanced() is False
    progress.begin()
    beat(progress, 2.0, r0=9, r1=11)
    assert progress.has_advanced() is True
    progress.begin()
    beat(progress, 3.0, r0=11)
    assert progress.has_advanced() is False


def test_messages_in_quick_succession_are_not_summed_up_each_time(progress):
    beat(progress, 0.0, r0=1)
    first = progress.summary
    for node in range(1, 100):
        beat(progress, node / 1000, **{f"r{node}": 1})
    assert progress.summary is first
    beat(progress, 1.0, r0=2)
    assert progress.summary.ranks == 100


def test_the_step_time_of_a_rank_is_a_mean_over_its_last_twenty_steps(progress):
    for step in range(30):
        beat(progress, step * 2.0, r0=step)
    assert progress.step_s(0, 58.0) == pytest.approx(2.0)
    for step in range(30, 60):
        beat(progress, 58 + (step - 29) * 5.0, r0=step)
    assert progress.step_s(0, 208.0) == pytest.approx(5.0)
    assert progress.step_s(1, 208.0) is None


def test_fast_steps_are_measured_over_ten_seconds(progress):
    for second in range(60):
        beat(progress, float(second), r0=second * 100)
    assert progress.step_s(0, 60.0) == pytest.approx(0.01)
    assert 1000 <= progress.timed_steps(0) <= 1100
    assert progress.timed_steps(1) == 0


def test_steps_between_two_reports_count_each(progress):
    beat(progress, 10.0, r0=0)
    assert progress.step_s(0, 10.0) is None
    beat(progress, 11.0, r0=100)
    assert progress.step_s(0, 11.0) == pytest.approx(0.01)
    assert progress.step_s(0, 12.0) == pytest.approx(0.01), "its next report may be on the way"


def test_a_step_that_does_not_end_makes_the_step_time_longer(progress):
    for step in range(10):
        beat(progress, float(step), r0=step)
    assert progress.step_s(0, 10.0) == pytest.approx(1.0)
    assert progress.step_s(0, 109.0) == pytest.approx(10.9)


def test_a_step_that_goes_back_begins_the_step_time_anew(progress):
    for step in range(10):
        beat(progress, float(step), r0=step)
    beat(progress, 20.0, r0=0)
    assert progress.step_s(0, 20.0) is None
    beat(progress, 23.0, r0=1)
    assert progress.step_s(0, 23.0) == pytest.approx(3.0)
