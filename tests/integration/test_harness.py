"""The launcher fixture itself: it must notice processes that survive."""

from __future__ import annotations

import os
import signal

import pytest


@pytest.fixture
def sleeper(tmp_path):
    """Return a program that holds the survivors' FIFO and sleeps."""
    path = tmp_path / "sleeper.py"
    programs = os.path.join(os.path.dirname(__file__), "..", "programs")
    path.write_text(
        f"import sys, signal\nsys.path.insert(0, {programs!r})\nimport survivor\nsurvivor.hold()\nsignal.pause()\n"
    )
    return path


def test_a_running_program_is_reported_as_a_survivor(distlaunch, sleeper):
    running = distlaunch.start(["train", "--num-procs", "1", sleeper])
    started = running.wait_event("workers_started")
    with pytest.raises(pytest.fail.Exception, match="these still run"):
        distlaunch.assert_no_survivors(within_s=1.0)
    assert set(started["pids"].values()) <= set(distlaunch.survivors())
    running.send_signal(signal.SIGTERM)
    running.wait()


def test_nothing_is_reported_once_the_job_has_ended(distlaunch, sleeper):
    running = distlaunch.start(["train", "--num-procs", "2", sleeper])
    running.wait_event("workers_started")
    while len(distlaunch.holding()) < 2:
        assert running.process.poll() is None
    running.send_signal(signal.SIGTERM)
    assert running.wait().returncode == 143
    distlaunch.assert_no_survivors()


def test_a_job_that_never_held_the_fifo_proves_nothing(distlaunch):
    assert distlaunch.train("--num-procs", "1", "--no-python", "/bin/true").returncode == 0
    with pytest.raises(AssertionError, match="no test program opened"):
        distlaunch.assert_no_survivors(within_s=0.2)
