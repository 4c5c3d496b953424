from __future__ import annotations

import json
import os
import threading

import pytest

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.coordinator.runtime.records import DiskWork, EventLog
from distlaunch.coordinator.runtime.remote_output import OutputThread
from distlaunch.coordinator.runtime.reports import Reporter
from distlaunch.coordinator.runtime.run_directory import make_run_dir
from distlaunch.core.model.run_files import MARKER, PID, TRAIN
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from tests.unit.coordinator.remote_agents import WITHIN_S, Kept


class Stuck(Kept):
    """A sink on a disk that hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.moves = threading.Event()
        self.reached = threading.Event()

    def output(self, rank, stream, data, now):
        self.reached.set()
        assert self.moves.wait(WITHIN_S)
        super().output(rank, stream, data, now)


class Shown(Kept):
    """A console that records its calls."""

    def say(self, text, *, level="info"):
        self.written.append((level, text))

    def event(self, record):
        self.written.append(("event", record["type"]))


@pytest.fixture
def stuck():
    files = Stuck()
    output_thread = OutputThread(files, nodes=1, grant=lambda node, size: None)
    output_thread.start()
    output_thread.take(0, m.Output(rank=0, stream=1, data=b"x"))
    assert files.reached.wait(WITHIN_S)
    yield files, output_thread
    files.moves.set()
    assert output_thread.finish(bound_s=WITHIN_S)


@pytest.fixture
def run_dir(tmp_path):
    made = make_run_dir(str(tmp_path), "job", {})
    yield made
    made.close()


def reporter(run_dir, disk_work: DiskWork, sink: Shown) -> Reporter:

    class Plan:
        layout = TRAIN
        run_dir = ""

    Plan.run_dir = run_dir.path
    os.mkdir(os.path.join(run_dir.path, "attempt-0"))
    events = EventLog(run_dir.events, sink, disk_work=disk_work)
    return Reporter(
        Plan,
        max_restarts=0,
        run_dir=run_dir,
        sink=sink,
        events=events,
        disk_work=disk_work,
        started_s=0.0,
    )  # type: ignore[arg-type]


def test_a_disk_that_stands_still_does_not_hold_up_whoever_writes_events_and_reports(
    stuck, run_dir
):
    files, output_thread = stuck
    shown = Shown()
    reported = reporter(run_dir, output_thread, shown)
    EventLog(run_dir.events, shown, disk_work=output_thread).write("first", {})
    EventLog(run_dir.events, shown, disk_work=output_thread).write("second", {})
    reported.keep_job_error(a.JobError(exit_code=69, message="no node"))
    stack = m.Stack(rank=0, pid=1, state="S", text="here")
    reported.keep_stacks(a.WriteStacks(attempt=0, stacks=(stack,)))
    exited = WorkerExit(
        attempt=0,
        rank=0,
        pid=5,
        returncode=1,
        uptime_s=1.0,
        ended=1.0,
        told_to_stop=False,
        oom_kills=0,
        error_file="{}",
        stderr_tail=b"",
    )
    reported.keep_error(exited)
    assert output_thread.ask(lambda: True) is None
    assert sorted(os.listdir(run_dir.path)) == [MARKER, "attempt-0", "events.jsonl", PID]
    assert os.listdir(os.path.join(run_dir.path, "attempt-0")) == []
    assert shown.written == [("event", "first"), ("event", "second")]
    files.moves.set()
    assert output_thread.finish(bound_s=WITHIN_S)
    with open(os.path.join(run_dir.path, "events.jsonl")) as lines:
        assert [json.loads(line)["type"] for line in lines] == ["first", "second"]
    with open(os.path.join(run_dir.path, "report.txt")) as report:
        assert report.read() == "distlaunch: error: no node\n"
    assert len(os.listdir(os.path.join(run_dir.path, "attempt-0"))) == 2


def test_a_task_after_the_end_runs_at_once():
    output_thread = OutputThread(Kept(), nodes=1, grant=lambda node, size: None)
    output_thread.start()
    assert output_thread.finish(bound_s=WITHIN_S)
    done: list[int] = []
    output_thread.do(lambda: done.append(1))
    assert done == [1]
    assert output_thread.ask(lambda: 7) == 7


def test_escape_sequences_of_a_node_are_not_in_the_report(run_dir):
    reported = "n1: \x1b[2Jhint\x07\n  caf\xe9: \u4e16\r"
    error = a.JobError(exit_code=69, message=reported, prefix="")
    reporter(run_dir, DiskWork(), Shown()).keep_job_error(error)
    with open(os.path.join(run_dir.path, "report.txt"), "rb") as report:
        assert report.read().decode() == "distlaunch: n1: \\x1b[2Jhint\\x07\n  caf\xe9: \u4e16\n"
