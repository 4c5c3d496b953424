"""A fault of ours in code that only observes a job does not end the job."""

from __future__ import annotations

import signal

import pytest

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.coordinator.policy.advisory import (
    Advisory,
    AdvisoryFault,
    AdvisoryPart,
    loss_of,
)
from distlaunch.coordinator.policy.hang_detection import HangDetector
from distlaunch.coordinator.policy.job_progress import Progress
from distlaunch.core.protocol import agent_messages as m
from distlaunch.diagnosis import first_cause
from tests.facts import mentions


def fail(*_: object, **__: object) -> None:
    raise TypeError("planted")


@pytest.fixture
def plant(monkeypatch):
    """Return a function that lets a function of ours raise TypeError."""
    return lambda owner, name: monkeypatch.setattr(owner, name, fail)


def faults(job) -> list[AdvisoryPart]:
    return [fault.part for fault in job.of(AdvisoryFault)]


def pass_time(job, seconds: float) -> None:
    until = job.now + seconds
    while (due := job.policy.deadline()) is not None and due <= until:
        job.now = max(job.now, due)
        job.tick()
    job.now = until


def alive(job, *ranks: int, step: int = 1) -> None:
    beats = tuple(m.Heartbeat(rank=rank, values={"step": step}) for rank in ranks)
    job.say(0, m.Alive(attempt=job.attempt, heartbeats=beats, wrote=ranks))


def answer_stacks(job) -> None:
    serial = max((asked.serial for _, asked in job.sent(m.CollectStacks)), default=0)
    stacks = tuple(m.Stack(rank=rank, pid=1000 + rank, state="S", text="") for rank in job.ranks)
    job.say(0, m.Stacks(attempt=job.attempt, serial=serial, stacks=stacks))


def test_the_first_fault_of_a_part_is_passed_on_with_its_traceback():
    found = []
    advisory = Advisory(found.append)
    assert advisory.call(AdvisoryPart.REPORT, 7, fail) == 7
    assert advisory.call(AdvisoryPart.REPORT, 7, fail) == 7
    assert advisory.call(AdvisoryPart.REPORT, 7, lambda: 8) == 8
    [fault] = found
    assert (fault.part, fault.text) == (AdvisoryPart.REPORT, "TypeError: planted")
    assert "in fail" in fault.traceback


def test_a_part_with_a_state_is_off_after_a_fault():
    advisory = Advisory(lambda _: None)
    advisory.call(AdvisoryPart.SERIES, None, fail)
    assert advisory.is_off(AdvisoryPart.SERIES)
    assert advisory.call(AdvisoryPart.SERIES, 7, lambda: 8) == 7


def test_an_expected_exception_is_no_fault():
    found = []
    with (
        pytest.raises(ValueError, match="x"),
        Advisory(found.append).watch(AdvisoryPart.CONTROL, expected=(ValueError,)),
    ):
        raise ValueError("x")
    assert found == []


def test_each_part_has_a_sentence():
    assert len({loss_of(part) for part in AdvisoryPart}) == len(AdvisoryPart)


HANG_CALLS = (
    "begin",
    "all_started",
    "deadline",
    "tick",
    "on_alive",
    "on_stacks",
    "decide",
    "on_worker_finished",
    "stop",
)


@pytest.mark.parametrize("name", HANG_CALLS)
def test_a_fault_in_hang_detection_turns_it_off(make_job, plant, name):
    plant(HangDetector, name)
    job = make_job(1, 3, hang_timeout_s=30.0).run()
    job.say(0, m.Alive(attempt=0, heartbeats=(), wrote=(0, 1, 2)))
    pass_time(job, 31.0)
    answer_stacks(job)
    pass_time(job, 0.5)
    for rank in job.ranks:
        job.exited(rank)
    job.all_gone()
    assert job.exit_code == 0
    assert faults(job) == [AdvisoryPart.HANG_DETECTION]


def test_a_fault_that_a_deadline_finds_is_reported_at_once(make_job, plant):
    job = make_job(1, 2, hang_timeout_s=30.0).run()
    plant(HangDetector, "deadline")
    assert job.policy.deadline() == float("-inf")
    job.tick()
    assert faults(job) == [AdvisoryPart.HANG_DETECTION]
    assert job.policy.deadline() is None


@pytest.mark.parametrize(
    ("name", "answers"),
    [("collect_before_stop", True), ("on_stacks", True), ("decide", True), ("tick", False)],
)
def test_ctrl_c_stops_the_workers_although_their_stacks_cannot_be_taken(
    make_job, plant, name, answers
):
    job = make_job(1, 3, hang_notice_s=300.0).run()
    pass_time(job, 305.0)
    plant(HangDetector, name)
    job.signal(signal.SIGINT)
    if answers:
        answer_stacks(job)
    pass_time(job, 3.0)
    assert [stop.signum for _, stop in job.sent(m.Stop)] == [signal.SIGINT]
    assert faults(job) == [AdvisoryPart.HANG_DETECTION]


@pytest.mark.parametrize("name", ["begin", "on_heartbeats", "end"])
def test_a_fault_in_the_progress_of_workers_does_not_end_the_job(make_job, plant, name):
    plant(Progress, name)
    job = make_job(1, 2).run()
    alive(job, 0, 1)
    for rank in job.ranks:
        job.exited(rank)
    job.all_gone()
    assert job.exit_code == 0
    assert faults(job) == [AdvisoryPart.PROGRESS]


def test_after_a_fault_in_progress_the_uptime_counts_as_progress(make_job, plant):
    plant(Progress, "on_heartbeats")
    job = make_job(1, 2, max_restarts=3, min_uptime_s=30.0).run()
    for _ in range(2):
        alive(job, 0, 1)
        job.fail(uptime_s=60.0)
        job.come_up()
    assert job.attempt == 2
    assert job.exit_code is None


def test_a_fault_in_the_diagnosis_leaves_a_report_of_the_exits(make_job, plant):
    plant(first_cause, "diagnose")
    job = make_job(1, 4).run()
    job.exited(2, 3, tail=b"first words\nlast words\n")
    job.tick()
    job.exited(0, 3, tail=b"words of rank 0")
    job.exited(1, -15, reported=True)
    job.exited(3, -9)
    job.all_gone()
    [report] = job.of(a.ReportFailure)
    cause = report.diagnosis.cause
    assert (set(cause.ranks), cause.returncode, job.exit_code) == ({0, 2}, 3, 3)
    assert cause.excerpt
    assert mentions(report.diagnosis.others, "rank 3", "9")
    assert mentions(report.diagnosis.others, "rank 1", "15")
    assert faults(job) == [AdvisoryPart.FIRST_CAUSE]


def test_a_fault_in_the_diagnosis_leaves_restarts_as_they_are(make_job, plant):
    plant(first_cause, "diagnose")
    job = make_job(1, 2, max_restarts=1).run()
    job.fail()
    assert job.attempt == 1
    job.come_up()
    job.fail()
    assert job.exit_code == 1
    assert faults(job) == [AdvisoryPart.FIRST_CAUSE]


def test_a_fault_in_the_look_at_the_first_failure_stops_the_others(make_job, plant):
    plant(first_cause, "looks_like_consequence")
    job = make_job(1, 3).run()
    job.exited(0, 1)
    assert len(job.sent(m.Stop)) == 1


def test_a_fault_in_the_diagnosis_of_a_stop_leaves_the_code_of_the_signal(make_job, plant):
    plant(first_cause, "diagnose_stop")
    job = make_job(1, 2).run()
    job.signal(signal.SIGTERM)
    for rank in job.ranks:
        job.exited(rank, 1, tail=job.RAISED, reported=True)
    job.all_gone()
    assert job.exit_code == 143
    assert faults(job) == [AdvisoryPart.FIRST_CAUSE]
