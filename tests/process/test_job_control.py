"""Ctrl-Z and ``fg``, in a real session with a controlling terminal and a parent that acts as a
shell."""

from __future__ import annotations

import json
import os
import signal
import time
from types import SimpleNamespace

import pytest

CTRL_Z, CTRL_C = b"\x1a", b"\x03"


@pytest.fixture
def paused(job, shell_job):
    """Start a job in the foreground of a terminal, type Ctrl-Z, and wait until the launcher is
    stopped."""

    class Paused:
        def __init__(self) -> None:
            self.stops = 0

        def start(self, *args, options=(), procs=2) -> None:
            words = ["train", "--num-procs", str(procs), *options, job.program("waits.py"), *args]
            self.shell, self.terminal = shell_job(*words)
            names = [f"ready-{rank}" for rank in range(procs)]
            job.until(lambda: all(map(job.has_sign, names)), f"signs {names}")
            self.launcher = int(job.sign("job"))
            self.workers = [int(job.sign(name)) for name in names]

        def type_ctrl_z(self) -> None:
            self.stops += 1
            os.write(self.terminal, CTRL_Z)
            job.until(
                lambda: job.has_sign(f"stopped-{self.stops}"),
                "the shell has seen the launcher stop",
            )

        def fg(self) -> None:
            job.put_sign(f"fg-{self.stops}")

    return Paused()


def test_ctrl_z_stops_the_warm_server_too_and_fg_lets_it_go_on(job, distlaunch, paused):
    paused.start("--note", "CONT", options=["--preload", "json"])
    server = job.server_of(SimpleNamespace(pid=paused.launcher))
    paused.type_ctrl_z()
    job.until(
        lambda: all(job.state_of(pid) == "T" for pid in (server, *paused.workers)),
        "all are stopped",
    )
    paused.fg()
    job.until(
        lambda: all(job.state_of(pid) in "SR" for pid in (server, *paused.workers)), "all go on"
    )
    os.write(paused.terminal, CTRL_C)
    job.until(lambda: paused.shell.poll() is not None, "the end of the job")
    distlaunch.assert_no_survivors()


def test_ctrl_z_stops_the_workers_trees_and_the_launcher_and_fg_goes_on(job, distlaunch, paused):
    paused.start("--child", "--note", "CONT")
    trees = [*paused.workers, *(int(job.sign(f"child-{rank}")) for rank in (0, 1))]
    paused.type_ctrl_z()
    assert int(job.sign("stopped-1")) == signal.SIGTSTP
    assert job.state_of(paused.launcher) == "T"
    job.until(
        lambda: all(job.state_of(pid) == "T" for pid in trees), "all of both trees are stopped"
    )

    paused.fg()
    job.until(
        lambda: job.has_sign("got-CONT-0") and job.has_sign("got-CONT-1"),
        "the workers are continued",
    )
    job.until(lambda: all(job.state_of(pid) != "T" for pid in trees), "their children as well")

    (job.work / "got-CONT-0").unlink()
    paused.type_ctrl_z()
    job.until(lambda: all(job.state_of(pid) == "T" for pid in trees), "a second time")
    paused.fg()
    job.until(lambda: job.has_sign("got-CONT-0"), "a second time")

    os.kill(paused.launcher, signal.SIGTERM)
    assert paused.shell.wait(30) == 143
    distlaunch.assert_no_survivors()


def test_ctrl_c_on_the_terminal_ends_the_job_with_130(job, distlaunch, paused):
    paused.start("--save", "INT,TERM")
    job.put_sign("go")
    os.write(paused.terminal, CTRL_C)
    assert paused.shell.wait(30) == 130
    assert job.has_sign("saved-0")
    assert job.has_sign("saved-1")
    distlaunch.assert_no_survivors()


def test_the_grace_does_not_run_on_while_the_job_is_paused(job, distlaunch, paused):
    """Paused for longer than the grace, workers still have the rest of it: they are killed after
    it."""
    grace_s = 1.5
    paused.start("--note", "TERM,CONT", options=["--grace", str(grace_s)])
    os.kill(paused.launcher, signal.SIGTERM)
    job.until(
        lambda: job.has_sign("got-TERM-0") and job.has_sign("got-TERM-1"), "both were asked to end"
    )
    for rank in (0, 1):
        (job.work / f"got-CONT-{rank}").unlink(missing_ok=True)  # TERM comes with CONT
    paused.type_ctrl_z()
    job.until(lambda: all(job.state_of(pid) == "T" for pid in paused.workers), "both are stopped")
    for rank in (0, 1):
        (job.work / f"got-CONT-{rank}").unlink(missing_ok=True)
    time.sleep(grace_s)  # not a wait for anything: time that must not count
    assert all(job.state_of(pid) == "T" for pid in paused.workers)
    paused.fg()
    job.until(lambda: job.has_sign("got-CONT-0") and job.has_sign("got-CONT-1"), "both went on")
    assert paused.shell.wait(30) == 143
    (run_dir,) = (entry for entry in distlaunch.jobs.iterdir() if not entry.is_symlink())
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert {e["returncode"] for e in events if e["type"] == "worker_exited"} == {-signal.SIGKILL}
    distlaunch.assert_no_survivors()


def test_kill_9_of_a_paused_launcher_leaves_nothing_behind(job, distlaunch, paused):
    paused.start("--child", "--ignore", "HUP", options=["--failure-grace", "0.5"])
    paused.type_ctrl_z()
    job.until(lambda: all(job.state_of(pid) == "T" for pid in paused.workers), "both are stopped")
    os.kill(paused.launcher, signal.SIGKILL)
    paused.fg()  # lets the shell go on, which reaps it
    assert paused.shell.wait(30) == 137
    distlaunch.assert_no_survivors()


def test_the_terminal_going_away_ends_the_job(job, distlaunch, paused):
    """As when the window is closed: the kernel sends HUP to the session leader, whose death hangs
    up the foreground."""
    paused.start(options=["--grace", "5"])
    paused.shell.kill()
    paused.shell.wait()
    distlaunch.assert_no_survivors()
    (run_dir,) = (entry for entry in distlaunch.jobs.iterdir() if not entry.is_symlink())
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert events[-1]["type"] == "job_ended"
    assert events[-1]["exit_code"] == 128 + signal.SIGHUP
