"""Restarts: how often, when not, and that nothing of an old attempt is left at the next."""

from __future__ import annotations

import json
import signal
import time

import pytest

from tests.facts import mentions
from tests.ports import free_port, is_free
from tests.process.conftest import until

AGAIN = ("--min-uptime", "0")
"""Any uptime is progress: nothing counts as a failure that would repeat."""


def exits(result, attempt: int) -> dict[int, int]:
    return {
        e["rank"]: e["returncode"]
        for e in result.of_type("worker_exited")
        if e["attempt"] == attempt
    }


def attempts(result) -> list[int]:
    return [event["attempt"] for event in result.of_type("attempt_started")]


def reported(job, attempt: int, rank: int) -> dict:
    return json.loads(job.sign(f"attempt-{attempt}-rank-{rank}"))


def test_a_restart_that_goes_well_gives_0(job, distlaunch):
    result = job.run("ends.py", "--rank", "1", "3", "ok", options=["--max-restarts", "1"])
    assert result.returncode == 0, result.stderr
    assert attempts(result) == [0, 1]
    assert exits(result, 0) == {0: -signal.SIGTERM, 1: 3}
    assert exits(result, 1) == {0: 0, 1: 0}
    assert "restart 1 of 1" in result.stderr
    assert "rank 1" in result.stderr
    assert mentions(result.stderr.splitlines()[-1], "succeeded", "attempt 1", "1 restart")
    distlaunch.assert_no_survivors()


def test_a_first_attempt_that_succeeds_is_silent(job):
    result = job.run("ends.py", "ok", options=["--max-restarts", "1"])
    assert result.returncode == 0
    assert "succeeded" not in result.stderr


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_a_job_that_always_fails_is_restarted_so_often_and_ends_with_the_last_code(
    job, distlaunch, restarts
):
    result = job.run(
        "ends.py", "3", "4", "5", "6", "7", options=["--max-restarts", str(restarts), *AGAIN]
    )
    assert result.returncode == 3 + restarts, result.stderr
    assert attempts(result) == list(range(restarts + 1))
    assert ("used up" in result.stderr) is (restarts > 0)
    number = f"attempt {restarts} (restart {restarts} of {restarts})"
    assert (number in result.stderr) is (restarts > 0)  # the number of the attempt's folder
    assert (result.run_dir / f"attempt-{restarts}").is_dir()
    distlaunch.assert_no_survivors()


def test_workers_get_the_number_of_the_attempt(job):
    job.run("ends.py", "3", "3", "ok", options=["--max-restarts", "5", *AGAIN])
    for attempt in range(3):
        for rank in (0, 1):
            env = reported(job, attempt, rank)["env"]
            assert env["TORCHELASTIC_RESTART_COUNT"] == str(attempt)
            assert env["DISTLAUNCH_ATTEMPT"] == str(attempt)
            assert env["TORCHELASTIC_MAX_RESTARTS"] == "5"
            assert env["RANK"] == str(rank)
            assert env["TORCHELASTIC_RUN_ID"] == reported(job, 0, 0)["env"]["TORCHELASTIC_RUN_ID"]


def test_every_attempt_has_a_port_of_its_own_which_all_ranks_share_and_which_is_free_afterwards(
    job,
):
    result = job.run("ends.py", "3", "3", "ok", options=["--max-restarts", "2", *AGAIN])
    assert result.returncode == 0
    ports = [int(reported(job, attempt, 0)["env"]["MASTER_PORT"]) for attempt in range(3)]
    assert ports == [int(reported(job, attempt, 1)["env"]["MASTER_PORT"]) for attempt in range(3)]
    assert ports == [event["master_port"] for event in result.of_type("attempt_started")]
    assert len({*ports}) == 3
    for port in ports:  # a program beside the tests may have got it since
        until(lambda port=port: is_free(port), f"port {port} is free")


def test_a_port_that_the_user_chose_stays_in_all_attempts(job):
    port = free_port()
    result = job.run(
        "ends.py", "3", "ok", options=["--max-restarts", "1", "--master-port", str(port), *AGAIN]
    )
    assert result.returncode == 0, result.stderr
    assert [reported(job, attempt, 1)["env"]["MASTER_PORT"] for attempt in (0, 1)] == [
        str(port)
    ] * 2


def test_logs_and_plans_of_all_attempts_are_kept(job):
    result = job.run("ends.py", "3", "3", "ok", options=["--max-restarts", "2", *AGAIN])
    for attempt in range(3):
        plan = json.loads((result.run_dir / f"plan-{attempt}.json").read_text())
        assert plan["attempt"] == attempt
        for rank in (0, 1):
            log = (result.run_dir / f"attempt-{attempt}" / f"rank-{rank}.log").read_text()
            assert log.startswith(f"attempt {attempt} rank {rank}\n")


def test_a_restart_waits_until_old_workers_that_ignore_term_have_been_killed(job, distlaunch):
    options = ["--max-restarts", "1", "--failure-grace", "0.5", *AGAIN]
    result = job.run("ends.py", "--ignore", "--rank", "1", "3", "ok", procs=3, options=options)
    assert result.returncode == 0, result.stderr
    assert exits(result, 0) == {0: -signal.SIGKILL, 1: 3, 2: -signal.SIGKILL}
    assert [reported(job, 1, rank)["older"] for rank in range(3)] == [[], [], []]
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("kind", ["clean_daemon", "bomb", "hopping", "stopped"])
def test_a_restart_waits_until_what_old_workers_left_behind_is_gone(job, distlaunch, kind):
    running = job.start(
        "leaves.py", "--ranks", "0,1", kind, "once", options=["--max-restarts", "1", *AGAIN]
    )
    job.await_signs(running, "ready-0-1", "ready-1-1")
    workers = [int(job.sign(f"ready-{rank}-1")) for rank in (0, 1)]
    assert not job.has_sign("overlap")
    assert sorted(distlaunch.holding()) == sorted(workers)
    running.send_signal(signal.SIGTERM)
    assert running.wait().returncode == 143
    distlaunch.assert_no_survivors()


# --- failures that would repeat


@pytest.mark.parametrize(
    ("how", "code", "message"), [("import", 1, "import error"), ("usage", 2, "usage error")]
)
def test_a_failure_that_would_repeat_is_not_retried_and_this_is_reported(job, how, code, message):
    result = job.run("ends.py", how, "ok", options=["--max-restarts", "3"])
    assert result.returncode == code
    assert attempts(result) == [0]
    assert (
        f"not restarted: a{'n' if message[0] in 'aeio' else ''} {message} would repeat"
        in result.stderr
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [("def (", "syntax error"), ("import module_that_nobody_has", "import error")],
)
def test_a_script_that_cannot_even_begin_is_not_retried(job, tmp_path, text, message):
    script = tmp_path / "script.py"
    script.write_text(text + "\n")
    result = job.run(script, options=["--max-restarts", "3"])
    assert result.returncode == 1
    assert attempts(result) == [0]
    assert f"{message} would repeat" in result.stderr
    assert result.stderr.count("not restarted") == 1


def test_a_module_that_its_package_lacks_is_not_retried(job):
    result = job.run("-m", "json.module_that_nobody_has", options=["--max-restarts", "3"])
    assert result.returncode == 1
    assert attempts(result) == [0]
    assert "not restarted" in result.stderr


@pytest.mark.parametrize("how", ["import", "usage"])
def test_with_a_minimal_uptime_of_0_even_such_a_failure_is_retried(job, how):
    result = job.run("ends.py", how, "ok", options=["--max-restarts", "3", *AGAIN])
    assert result.returncode == 0
    assert attempts(result) == [0, 1]


def test_without_restarts_asked_for_nothing_is_reported_about_restarts(job):
    result = job.run("ends.py", "import")
    assert result.returncode == 1
    assert "not restarted" not in result.stderr
    assert "used up" not in result.stderr


# --- the same failure twice


def test_the_same_exception_from_the_same_line_twice_ends_the_job(job):
    result = job.run("ends.py", "raise-a", options=["--max-restarts", "5"])
    assert result.returncode == 1
    assert attempts(result) == [0, 1]
    assert result.of_type("failure")[-1]["reason"] == "no_progress"


def test_the_same_exception_from_another_line_is_another_failure(job):
    result = job.run(
        "ends.py", "raise-a", "raise-b", "raise-a", "ok", options=["--max-restarts", "5"]
    )
    assert result.returncode == 0, result.stderr
    assert attempts(result) == [0, 1, 2, 3]


def test_with_progress_the_same_failure_is_retried(job):
    result = job.run("ends.py", "raise-a", options=["--max-restarts", "3", *AGAIN])
    assert result.returncode == 1
    assert attempts(result) == [0, 1, 2, 3]
    assert result.of_type("failure")[-1]["reason"] == "used_up"
    assert "3 restarts" in result.stderr


def test_progress_is_an_uptime_of_at_least_the_minimum(job):
    running = job.start(
        *("--no-python", "/bin/sh", "-c", 'sleep 0.6; exit "$((3 + DISTLAUNCH_ATTEMPT))"'),
        options=["--max-restarts", "2", "--min-uptime", "0.5"],
    )
    result = running.wait()
    assert attempts(result) == [0, 1, 2]
    assert result.returncode == 5


# --- how often within what time


def test_only_restarts_within_the_window_count(job):
    """Each attempt lasts longer than the window, so each restart is the first in it."""
    options = ["--max-restarts", "1", "--restart-window", "0.2", *AGAIN]
    words = ["--no-python", "/bin/sh", "-c", 'sleep 0.3; [ "$DISTLAUNCH_ATTEMPT" = 3 ] || exit 3']
    result = job.run(*words, options=options)
    assert result.returncode == 0, result.stderr
    assert attempts(result) == [0, 1, 2, 3]


def test_restarts_are_used_up_within_a_window_that_holds_them_all(job):
    options = ["--max-restarts", "2", "--restart-window", "600", *AGAIN]
    result = job.run("ends.py", "3", options=options)
    assert result.returncode == 3
    assert attempts(result) == [0, 1, 2]
    assert mentions(result.stderr.splitlines()[-1], "2 restarts", "600 s")


# --- told to stop


def test_a_job_that_is_asked_to_stop_is_not_restarted(job):
    running = job.start("waits.py", options=["--max-restarts", "3", *AGAIN])
    job.await_ready(running)
    running.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.returncode == 143
    assert attempts(result) == [0]


def test_a_signal_while_a_failed_attempt_is_being_stopped_prevents_the_restart(job):
    options = ["--max-restarts", "3", "--failure-grace", "100", *AGAIN]
    running = job.start("ends.py", "--ignore", "--rank", "1", "3", options=options)
    running.wait_event("worker_exited")
    running.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.returncode == 143
    assert attempts(result) == [0]


def test_a_second_attempt_can_be_asked_to_stop_as_well(job, distlaunch):
    running = job.start(
        "ends.py", "--rank", "1", "3", "consequence", options=["--max-restarts", "1", *AGAIN]
    )
    job.await_signs(running, "attempt-1-rank-0")
    running.wait_event("worker_exited", count=3)
    running.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.returncode == 143
    distlaunch.assert_no_survivors()


def test_a_launcher_that_is_killed_in_its_second_attempt_leaves_nothing(job, distlaunch):
    running = job.start(
        "leaves.py", "--ranks", "0,1", "daemon", "once", options=["--max-restarts", "1", *AGAIN]
    )
    job.await_signs(running, "ready-0-1", "ready-1-1")
    running.process.kill()
    running.process.wait()
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("delay_ms", range(0, 400, 40))
def test_a_signal_at_any_moment_of_endless_restarts_ends_the_job(job, distlaunch, delay_ms):
    running = job.start("ends.py", "--rank", "1", "3", options=["--max-restarts", "1000", *AGAIN])
    running.wait_event("worker_exited")
    time.sleep(delay_ms / 1000)
    running.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.returncode == 143, result.stderr
    after = [
        event["type"]
        for event in result.events
        if event["time"] > result.of_type("signal")[0]["time"]
    ]
    assert "attempt_started" not in after
    distlaunch.assert_no_survivors()


# --- the delay before a restart


def test_the_delay_of_a_restart_doubles_and_is_told(job):
    options = ["--max-restarts", "2", "--restart-delay", "0.1:60", *AGAIN]
    result = job.run("ends.py", "3", "4", "ok", options=options)
    assert result.returncode == 0, result.stderr
    assert [event["delay_s"] for event in result.of_type("restarting")] == [0.1, 0.2]
    assert [line for line in result.stderr.splitlines() if "restarting in" in line] == [
        "distlaunch: restarting in 0.1 s ...",
        "distlaunch: restarting in 0.2 s ...",
    ]
    assert attempts(result) == [0, 1, 2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_restart_is_delayed_ends_the_job_at_once(job, distlaunch, number):
    running = job.start(
        "ends.py", "3", "ok", options=["--max-restarts", "1", "--restart-delay", "1h"]
    )
    running.wait_event("restarting")
    running.send_signal(number)
    result = running.wait()
    assert result.returncode == 128 + number
    assert attempts(result) == [0]
    assert mentions(result.stderr, "restart", "not begun")
    distlaunch.assert_no_survivors()


def test_a_delay_that_cannot_be_read_is_refused_with_what_is_expected(job):
    result = job.run("ends.py", "ok", options=["--restart-delay", "60:8"])
    assert result.returncode == 2
    assert mentions(result.stderr, "--restart-delay", "S:MAX", "'60:8'")
