"""The first failure ends the job: with its own code, all workers stopped, then killed."""

from __future__ import annotations

import signal

import pytest


def exits(result) -> dict[int, int]:
    """Return each rank's return code, of the last attempt."""
    return {event["rank"]: event["returncode"] for event in result.of_type("worker_exited")}


def test_all_workers_that_end_with_0_give_0(job, distlaunch):
    result = job.run("ends.py", "ok", procs=3)
    assert result.returncode == 0, result.stderr
    assert exits(result) == {0: 0, 1: 0, 2: 0}
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("code", [1, 2, 77, 128, 255])
def test_the_code_of_the_worker_that_failed_is_the_launchers(job, distlaunch, code):
    result = job.run("ends.py", "--rank", "1", str(code), procs=3)
    assert result.returncode == code, result.stderr
    assert exits(result) == {0: -signal.SIGTERM, 1: code, 2: -signal.SIGTERM}
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("name", ["SEGV", "ABRT", "KILL", "TERM", "HUP", "USR1", "PIPE"])
def test_a_worker_ended_by_signal_n_gives_128_plus_n(job, distlaunch, name):
    result = job.run("ends.py", "--rank", "1", name)
    assert result.returncode == 128 + getattr(signal, f"SIG{name}"), result.stderr
    assert f"SIG{name}" in result.stderr
    distlaunch.assert_no_survivors()


def test_a_worker_that_fails_while_another_has_long_ended_well_fails_the_job(job):
    running = job.start(
        "--no-python",
        "/bin/sh",
        "-c",
        'if [ "$RANK" = 1 ]; then until [ -e go ]; do sleep 0.01; done; exit 5; fi',
    )
    running.wait_event("worker_exited")
    job.put_sign("go")
    result = running.wait()
    assert result.returncode == 5
    assert exits(result) == {0: 0, 1: 5}


def test_siblings_that_ignore_term_are_killed_after_the_failure_grace(job, distlaunch):
    result = job.run(
        "ends.py",
        "--ignore",
        "--rank",
        "1",
        "3",
        procs=3,
        options=["--failure-grace", "0.3", "--grace", "50"],
    )
    assert result.returncode == 3, result.stderr
    assert exits(result) == {0: -signal.SIGKILL, 1: 3, 2: -signal.SIGKILL}
    reported = {event["rank"]: event["told_to_stop"] for event in result.of_type("worker_exited")}
    assert reported == {0: True, 1: False, 2: True}
    distlaunch.assert_no_survivors()


def test_siblings_that_save_are_given_the_failure_grace(job):
    running = job.start(
        "--no-python",
        "/bin/sh",
        "-c",
        'trap "touch got; until [ -e go ]; do sleep 0.01; done; touch saved; exit 0" TERM; touch up-$RANK;'
        'until [ -e up-0 ] && [ -e up-1 ]; do sleep 0.01; done; [ "$RANK" = 1 ] && exit 4; while :; do sleep 0.01; done',
        options=["--failure-grace", "60"],
    )
    job.await_signs(running, "got")
    job.put_sign("go")
    result = running.wait()
    assert result.returncode == 4
    assert exits(result) == {0: 0, 1: 4}
    assert job.has_sign("saved")


def test_failure_grace_0_kills_at_once(job, distlaunch):
    result = job.run("ends.py", "--rank", "0", "3", options=["--failure-grace", "0"])
    assert result.returncode == 3
    assert exits(result) == {0: 3, 1: -signal.SIGKILL}
    distlaunch.assert_no_survivors()


def test_a_cause_that_shows_after_its_consequence_gives_the_code(job):
    running = job.start("ends.py", "--rank", "1", "consequence")
    running.wait_event("worker_exited")
    job.put_sign("go")
    result = running.wait()
    assert exits(result) == {0: 7, 1: 1}
    assert result.returncode == 7, result.stderr
    assert not any(event["told_to_stop"] for event in result.of_type("worker_exited"))


def test_a_consequence_whose_cause_never_shows_ends_the_job_all_the_same(job, distlaunch):
    result = job.run("ends.py", "--rank", "1", "consequence")
    assert result.returncode == 1
    assert exits(result) == {0: -signal.SIGTERM, 1: 1}
    distlaunch.assert_no_survivors()


def test_a_stopped_sibling_does_not_hold_up_the_end_of_a_failed_job(job, distlaunch):
    running = job.start(
        "--no-python",
        "/bin/sh",
        "-c",
        'touch up-$RANK; if [ "$RANK" = 0 ]; then kill -STOP $$; fi; until [ -e go ]; do sleep 0.01; done; exit 6',
        options=["--failure-grace", "60"],
    )
    job.await_signs(running, "up-0", "up-1")
    job.put_sign("go")
    assert running.wait().returncode == 6


def test_a_program_that_cannot_be_run_is_reported_and_ends_the_job(job, tmp_path):
    script = tmp_path / "no-interpreter"
    script.write_text("#!/does/not/exist\n")
    script.chmod(0o755)
    result = job.run("--no-python", script)
    assert result.returncode == 127, result.stderr
    assert "no-interpreter" in result.stderr
    assert "No such file" in result.stderr


def test_workers_that_kill_their_own_process_group_harm_nobody_else(job):
    running = job.start(
        "--no-python",
        "/bin/sh",
        "-c",
        'if [ "$RANK" = 1 ]; then until [ -e go ]; do sleep 0.01; done; kill -KILL 0; fi',
    )
    running.wait_event("worker_exited")
    job.put_sign("go")
    result = running.wait()
    assert result.returncode == 128 + signal.SIGKILL
    assert exits(result) == {0: 0, 1: -signal.SIGKILL}
