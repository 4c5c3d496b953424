"""Many jobs at once, and one job of many workers."""

from __future__ import annotations

import os
import signal

import pytest

JOBS = 10
WORKERS = 1024


def test_ten_jobs_at_once_all_succeed_with_different_ports(job):
    """The workers of all jobs wait at a FIFO until the last have started."""
    gate = job.work / "gate"
    os.mkfifo(gate)
    words = ["--no-python", "/bin/sh", "-c", "read line <gate; exit 0"]
    running = [job.start(*words, options=["--log-dir", f"jobs-{number}"]) for number in range(JOBS)]
    ports = [one.wait_event("attempt_started")["master_port"] for one in running]
    for one in running:
        one.wait_workers(2)
    assert len({*ports}) == JOBS
    gate_end = os.open(gate, os.O_RDWR)
    os.write(gate_end, b"\n" * (2 * JOBS))  # a line for each: all go
    results = [one.wait() for one in running]
    os.close(gate_end)
    assert [result.returncode for result in results] == [0] * JOBS, [
        result.stderr for result in results
    ]


@pytest.mark.timeout(180)
def test_1024_workers_start_and_end(job):
    result = job.run("--no-python", "/bin/true", procs=WORKERS, timeout=150)
    assert result.returncode == 0, result.stderr[-3000:]
    ended = {event["rank"] for event in result.of_type("worker_exited")}
    assert ended == set(range(WORKERS))


def test_workers_that_have_ended_leave_no_descriptor_and_no_thread(job):
    workers = 128
    script = '[ "$RANK" = 7 ] || exit 0; exec sleep 1000'
    running = job.start("--no-python", "/bin/sh", "-c", script, procs=workers)
    running.wait_event("worker_exited", count=workers - 1, timeout=60)
    for pid in (running.pid, job.spawner_of(running)):
        descriptors = running.wait_for(lambda pid=pid: _few(pid), f"few descriptors of {pid}")
        assert descriptors
    assert len(os.listdir(f"/proc/{running.pid}/task")) <= 5
    assert len(os.listdir(f"/proc/{job.spawner_of(running)}/task")) == 1
    assert len(job.children_of(job.spawner_of(running))) == 1, "no zombie is left"
    running.send_signal(signal.SIGTERM)
    assert running.wait().returncode == 143


def _few(pid: int) -> list[str]:
    descriptors = os.listdir(f"/proc/{pid}/fd")
    return descriptors if len(descriptors) < 30 else []
