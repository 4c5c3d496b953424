"""Processes below a worker that has ended: a program whose wrapper is gone, and an upload after the
training."""

from __future__ import annotations

import os
import re
import signal
import sys

import pytest

from tests.facts import mentions
from tests.process.conftest import later_than_a_double

SHELL = ["--no-python", "/bin/bash", "-c", '"$@"; true', "wrap.sh", sys.executable]
"""A shell that does not execute the program in its place."""


def exits(result) -> dict[int, int]:
    return {event["rank"]: event["returncode"] for event in result.of_type("worker_exited")}


@pytest.fixture(params=["shell", "Python"])
def wrapped(request, job):
    """Start two workers, each a wrapper with a program below it that saves at TERM."""

    def start(*args: str, program: str = "waits.py", **kwargs):
        words = SHELL if request.param == "shell" else [job.program("wraps.py")]
        return job.start(*words, job.program(program), *args, **kwargs)

    return start


SAVING = ("--save", "TERM")
GRACE = ("--grace", "60", "--failure-grace", "60")


def let_save(job, running, *ranks: int) -> None:
    """Let programs save after TERM, when their wrappers have ended."""
    job.until(
        lambda: all(job.has_sign(f"got-TERM-{rank}") for rank in ranks),
        "the programs were asked to end",
    )
    job.put_sign("go")
    job.until(
        lambda: all(job.has_sign(f"saved-{rank}") for rank in ranks), "the programs have saved"
    )


# --- the grace is for all processes of a worker


@pytest.mark.parametrize("name", ["TERM", "HUP"])
def test_a_program_saves_after_its_wrapper_has_ended(job, distlaunch, wrapped, name):
    running = wrapped(*SAVING, options=GRACE)
    job.await_ready(running)
    running.send_signal(getattr(signal, f"SIG{name}"))
    running.wait_event("worker_exited", count=2)
    let_save(job, running, 0, 1)
    result = running.wait()
    assert result.returncode == 128 + getattr(signal, f"SIG{name}")
    assert mentions(result.stderr.rstrip().splitlines()[-1], "stopped", "2 workers", "none")
    distlaunch.assert_no_survivors()


def test_after_ctrl_c_a_program_whose_wrapper_has_ended_is_asked_by_term(job, distlaunch):
    running = job.start(job.program("wraps.py"), job.program("waits.py"), *SAVING, options=GRACE)
    job.await_ready(running)
    running.send_signal(signal.SIGINT)
    let_save(job, running, 0, 1)
    assert running.wait().returncode == 130
    distlaunch.assert_no_survivors()


def test_a_program_saves_when_another_worker_has_failed(job, distlaunch, wrapped):
    """The wrapper of rank 1 is killed. Its program is asked to end before the job starts again."""
    running = wrapped(*SAVING, options=["--max-restarts", "1", "--min-uptime", "0", *GRACE])
    job.await_ready(running)
    pids = running.wait_workers(2)
    wrapper = running.wait_event("workers_started")["pids"]
    os.kill(wrapper.get("1") or pids[1], signal.SIGKILL)
    let_save(job, running, 0, 1)
    running.wait_workers(4)
    running.send_signal(signal.SIGTERM)
    assert running.wait().returncode == 143
    distlaunch.assert_no_survivors()


def test_a_program_of_a_hung_job_saves(job, distlaunch, wrapped):
    running = wrapped(*SAVING, options=["--hang-timeout", "1.5", *GRACE])
    job.await_ready(running)
    let_save(job, running, 0, 1)
    assert running.wait().returncode == 124
    distlaunch.assert_no_survivors()


def test_a_program_saves_when_the_launcher_was_killed(job, distlaunch, wrapped):
    running = wrapped(*SAVING, options=GRACE)
    job.await_ready(running)
    running.process.kill()
    running.process.wait()
    let_save(job, running, 0, 1)
    distlaunch.assert_no_survivors()


def test_a_program_that_takes_no_term_is_killed_after_the_grace_and_counted(
    job, distlaunch, wrapped
):
    running = wrapped("--ignore", "TERM", options=["--grace", "0.5"])
    job.await_ready(running)
    running.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.returncode == 143
    last = result.stderr.rstrip().splitlines()[-1]
    assert re.search(
        r"stopped: 2 workers .* none .* 2 processes .* ranks 0-1 .* killed: "
        r"python\S* \S*waits\.py --ignore TERM \(rank [01], pid \d+\), ",
        last,
    ), last
    distlaunch.assert_no_survivors()


def test_the_report_of_a_failure_names_what_had_to_be_killed(job, distlaunch):
    words = ["--ignore", "--fail", "3", "--ranks", "1", "--wait"]
    running = job.start("uploads.py", *words, options=["--failure-grace", "0.5"])
    job.await_signs(running, "uploading-1")
    result = running.wait()
    assert result.returncode == 3
    assert mentions(
        result.stderr, "1 process", "rank 1", "killed", "0.5 s", "--failure-grace", "python"
    )
    distlaunch.assert_no_survivors()


def test_each_process_gets_term_once(job, wrapped):
    """Under --no-python all processes get it at once, else when the wrapper ends."""
    running = wrapped("--note", "TERM", options=["--grace", "100"])
    job.await_ready(running)
    running.send_signal(signal.SIGTERM)
    running.wait_event("worker_exited", count=2)
    job.await_signs(running, "got-TERM-0", "got-TERM-1")
    for rank in (0, 1):
        (job.work / f"got-TERM-{rank}").unlink()
    later_than_a_double()
    assert not any(job.has_sign(f"got-TERM-{rank}") for rank in (0, 1))
    running.send_signal(signal.SIGTERM)
    assert running.wait().returncode == 143


def test_the_data_loader_lives_while_the_program_of_a_wrapper_saves(job, distlaunch):
    running = job.start(
        job.program("wraps.py"), job.program("waits.py"), *SAVING, "--child", options=GRACE
    )
    job.await_ready(running)
    running.send_signal(signal.SIGTERM)
    let_save(job, running, 0, 1)
    running.wait()
    assert not job.has_sign("child-got-TERM-0")
    distlaunch.assert_no_survivors()


def test_a_forgotten_process_does_not_cost_the_grace_at_a_restart(job, distlaunch):
    script = "sleep 1000 & exit $((DISTLAUNCH_ATTEMPT ? 0 : 3))"
    options = [
        "--max-restarts",
        "1",
        "--min-uptime",
        "0",
        "--failure-grace",
        "1000",
        "--linger",
        "0",
    ]
    result = job.run("--no-python", "/bin/bash", "-c", script, options=options)
    assert result.returncode == 0, result.stderr


# --- after a success


def test_processes_that_a_worker_leaves_run_on_while_others_train(job, distlaunch):
    running = job.start("uploads.py", "--wait", options=["--linger", "0"])
    running.wait_event("worker_exited")
    job.put_sign("go")
    job.await_signs(running, "uploaded-0")
    job.put_sign("end")
    result = running.wait()
    assert result.returncode == 0
    assert "rank 0 has uploaded" in result.stdout
    assert not job.has_sign("terms-0")
    assert "left" not in result.stderr


def test_after_the_last_worker_what_is_left_may_end_by_itself(job, distlaunch):
    running = job.start("uploads.py", options=["--linger", "100"])
    running.wait_stderr("waiting up to 100 s (--linger) for 1 process left by rank 0: python")
    pid = job.sign("uploading-0")
    assert f"(pid {pid})" in running.stderr
    job.put_sign("go")
    result = running.wait()
    assert (result.returncode, job.has_sign("uploaded-0"), job.has_sign("terms-0")) == (
        0,
        True,
        False,
    )
    assert result.stdout.splitlines()[-1].endswith("rank 0 has uploaded")
    assert "ended 1 process" not in result.stderr
    distlaunch.assert_no_survivors()


def test_after_the_time_for_it_what_is_left_gets_term_and_is_named(job, distlaunch):
    result = job.run(
        "uploads.py", "--ranks", "0,1", options=["--linger", "0.2", "--failure-grace", "60"]
    )
    assert result.returncode == 0
    assert job.has_sign("got-TERM-0")
    assert job.has_sign("got-TERM-1")
    pids = {rank: job.sign(f"uploading-{rank}") for rank in (0, 1)}
    [line] = [line for line in result.stderr.splitlines() if "ended" in line]
    assert line.startswith("distlaunch: ended 2 processes left by ranks 0-1: python")
    assert all(f"(rank {rank}, pid {pid})" in line for rank, pid in pids.items())
    [event] = result.of_type("leftovers_ended")
    assert (event["ended"], event["killed"], {str(each["pid"]) for each in event["processes"]}) == (
        2,
        0,
        set(pids.values()),
    )
    distlaunch.assert_no_survivors()


def test_a_process_that_ignores_term_gets_kill_after_the_failure_grace(job, distlaunch):
    result = job.run("uploads.py", "--ignore", options=["--linger", "0", "--failure-grace", "0.3"])
    assert result.returncode == 0
    assert mentions(result.stderr, "1 process", "rank 0", "1 of", "KILL", "python")
    (event,) = result.of_type("leftovers_ended")
    assert (event["ended"], event["killed"]) == (1, 1)
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_a_signal_cuts_the_wait_short_and_leaves_the_success(job, distlaunch, name):
    running = job.start("uploads.py", options=["--linger", "1000", "--failure-grace", "100"])
    running.wait_stderr("waiting up to 1,000 s")
    running.send_signal(getattr(signal, f"SIG{name}"))
    result = running.wait()
    assert result.returncode == 0
    assert job.has_sign("got-TERM-0")
    assert mentions(result.stderr, f"SIG{name}", "left")
    distlaunch.assert_no_survivors()


def test_a_second_signal_kills_what_workers_have_left(job, distlaunch):
    running = job.start(
        "uploads.py", "--ignore", options=["--linger", "1000", "--failure-grace", "1000"]
    )
    running.wait_stderr("waiting up to 1,000 s")
    running.send_signal(signal.SIGINT)
    job.until(lambda: job.has_sign("terms-0"), "it was asked")
    later_than_a_double()
    running.send_signal(signal.SIGINT)
    assert running.wait().returncode == 0
    distlaunch.assert_no_survivors()


def test_resource_trackers_and_the_preload_server_are_not_waited_for(job, distlaunch):
    options = ["--preload", "json", "--linger", "1000"]
    result = job.run("uploads.py", "--ranks", "", "--track", options=options, timeout=50)
    assert result.returncode == 0
    assert "left" not in result.stderr
    distlaunch.assert_no_survivors()


def test_processes_that_a_forked_worker_leaves_are_waited_for_but_not_the_preload_server(
    job, distlaunch
):
    running = job.start("uploads.py", "--track", options=["--preload", "json", "--linger", "100"])
    running.wait_stderr("waiting up to 100 s (--linger) for 1 process left by rank 0: ")
    job.put_sign("go")
    assert running.wait().returncode == 0
    assert job.has_sign("uploaded-0")
    distlaunch.assert_no_survivors()


def test_under_torchrun_what_workers_leave_is_waited_for_too(job, distlaunch):
    words = ["torchrun", "--nproc-per-node", "2", job.program("uploads.py")]
    running = distlaunch.start(words, env={"DISTLAUNCH_LINGER": "100"})
    running.wait_stderr("waiting up to 100 s (DISTLAUNCH_LINGER) for 1 process left by rank 0: ")
    job.put_sign("go")
    assert running.wait().returncode == 0
    assert job.has_sign("uploaded-0")
    distlaunch.assert_no_survivors()
