"""Signals to the launcher: stop, pass on, pause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distlaunch.coordinator.policy.signals import MERGE_S, SECOND_S
from tests.facts import mentions
from tests.process.conftest import later_than_a_double


def exits(result) -> dict[int, int]:
    return {event["rank"]: event["returncode"] for event in result.of_type("worker_exited")}


@pytest.fixture
def saving(job):
    """Start two workers that save on a signal, and wait for the sign ``go`` meanwhile."""

    def start(name: str, *args: str, **kwargs):
        names = name if name == "TERM" else f"{name},TERM"  # TERM comes as well where saving lasts
        running = job.start("waits.py", "--save", names, *args, **kwargs)
        job.await_ready(running)
        return running

    return start


@pytest.mark.parametrize(("name", "asked"), [("TERM", "TERM"), ("INT", "INT"), ("HUP", "TERM")])
def test_workers_that_save_and_exit_0_when_asked_do_not_hide_the_stop(
    job, distlaunch, saving, name, asked
):
    running = saving(asked)
    number = getattr(signal, f"SIG{name}")
    running.send_signal(number)
    job.await_signs(running, f"got-{asked}-0", f"got-{asked}-1")
    job.put_sign("go")
    result = running.wait()
    assert result.returncode == 128 + number
    assert exits(result) == {0: 0, 1: 0}
    assert job.has_sign("saved-0")
    assert job.has_sign("saved-1")
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP"])
def test_workers_that_take_no_notice_are_killed_after_the_grace(job, distlaunch, name):
    options = ["--grace", "0.3", "--failure-grace", "60"]
    running = job.start("waits.py", "--ignore", "TERM,INT,HUP", options=options)
    job.await_ready(running)
    running.send_signal(getattr(signal, f"SIG{name}"))
    result = running.wait()
    assert result.returncode == 128 + getattr(signal, f"SIG{name}")
    assert exits(result) == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    distlaunch.assert_no_survivors()


def test_workers_with_default_handling_end_by_the_signal_that_we_got(job, distlaunch):
    running = job.start("waits.py")
    job.await_ready(running)
    running.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.returncode == 143
    assert exits(result) == {0: -signal.SIGTERM, 1: -signal.SIGTERM}
    distlaunch.assert_no_survivors()


def test_quit_kills_at_once(job, distlaunch):
    running = job.start("waits.py", "--ignore", "TERM,INT,QUIT", options=["--grace", "100"])
    job.await_ready(running)
    running.send_signal(signal.SIGQUIT)
    result = running.wait()
    assert result.returncode == 128 + signal.SIGQUIT
    assert exits(result) == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    distlaunch.assert_no_survivors()


def test_grace_0_kills_at_once(job, distlaunch):
    running = job.start("waits.py", "--ignore", "TERM", options=["--grace", "0"])
    job.await_ready(running)
    running.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.returncode == 143
    assert exits(result) == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    distlaunch.assert_no_survivors()


def test_workers_whose_save_fails_are_named_in_the_last_line_and_the_report(job, distlaunch):
    script = """
import os, signal
from signs import sign
def save(*_):
    raise OSError(28, "No space left on device", "/checkpoints/model.pt")
signal.signal(signal.SIGTERM, save)
sign(f"ready-{os.environ['RANK']}")
while True:
    signal.pause()
"""
    (job.work / "full.py").write_text(script)
    running = job.start(
        Path("full.py"), env={"PYTHONPATH": str(Path(__file__).parents[1] / "programs")}
    )
    job.await_signs(running, "ready-0", "ready-1")
    running.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.returncode == 143
    why = "OSError: [Errno 28] No space left on device: '/checkpoints/model.pt'"
    last = result.stderr.rstrip().splitlines()[-1]
    assert mentions(last, "stopped", "2 workers", "none", "both ranks", why, "(full.py:5 in save)")
    report = (result.run_dir / "report.txt").read_text()
    assert report.startswith("both ranks failed while they stopped: exit code 1\n")
    assert why in report
    [failure] = result.of_type("failure")
    assert (failure["final"], failure["while_stopping"]) == (True, True)


# --- nohup


def test_under_nohup_neither_launcher_nor_workers_take_notice_of_hup(job):
    running = job.start("waits.py", preexec=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    workers = job.await_ready(running)
    running.send_signal(signal.SIGHUP)
    for pid in workers:
        os.kill(pid, signal.SIGHUP)
    later_than_a_double()
    running.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.returncode == 143
    assert exits(result) == {0: -signal.SIGTERM, 1: -signal.SIGTERM}
    assert [event["signal"] for event in result.of_type("signal")] == ["SIGTERM"]


def test_int_ends_a_background_job_of_a_script_too(job):
    """``&`` in a script ignores INT: neither the launcher nor its workers do."""
    running = job.start("waits.py", preexec=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    job.await_ready(running)
    running.send_signal(signal.SIGINT)
    result = running.wait()
    assert result.returncode == 130
    assert all(code in (1, 130, -signal.SIGINT) for code in exits(result).values()), exits(result)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_under_nohup_in_the_background_of_a_script_only_term_ends_the_job(job, number):
    """``nohup distlaunch ... &`` in a script: a Ctrl-C for something else reaches the whole process
    group."""

    def as_a_script_starts_it() -> None:
        for ignored in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)

    running = job.start("waits.py", "--note", "USR1", preexec=as_a_script_starts_it)
    job.await_ready(running)
    running.send_signal(number)
    running.send_signal(signal.SIGUSR1)
    job.await_signs(running, "got-USR1-0", "got-USR1-1")
    running.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.returncode == 143
    assert [event["signal"] for event in result.of_type("signal")] == ["SIGUSR1", "SIGTERM"]


# --- one signal, two signals


def test_a_second_int_skips_the_grace(job, distlaunch, saving):
    running = saving("INT", options=["--grace", "100"])
    running.send_signal(signal.SIGINT)
    job.await_signs(running, "got-INT-0", "got-INT-1")
    later_than_a_double()
    running.send_signal(signal.SIGINT)
    result = running.wait()
    assert result.returncode == 130
    assert exits(result) == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    distlaunch.assert_no_survivors()


def test_a_second_int_within_a_second_does_not_take_the_time_to_save(job, saving):
    """As a notebook's interrupt sends it, and uv."""
    running = saving("INT", options=["--grace", "100"])
    running.send_signal(signal.SIGINT)
    job.await_signs(running, "got-INT-0", "got-INT-1")
    running.wait_stderr("press Ctrl-C again after 1 s to kill all workers now")
    time.sleep(2 * MERGE_S)  # nearer ones are one signal
    running.send_signal(signal.SIGINT)
    early = (
        running.wait_event("signal", count=2)["time"] - running.wait_event("signal")["time"]
        < SECOND_S
    )
    job.put_sign("go")
    result = running.wait()
    assert result.returncode == 130
    assert exits(result) == ({0: 0, 1: 0} if early else {0: -signal.SIGKILL, 1: -signal.SIGKILL})


def test_two_signals_at_once_are_one(job, saving):
    running = saving("INT", options=["--grace", "100"])
    running.send_signal(signal.SIGSTOP)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # two of one kind would already be one to the kernel
        running.send_signal(number)
    running.send_signal(signal.SIGCONT)
    running.wait_event("signal")
    job.put_sign("go")
    result = running.wait()
    assert result.returncode in (130, 143), "of those that wait, either is seen first"
    assert exits(result) == {0: 0, 1: 0}


def test_a_second_term_kills_where_no_scheduler_sent_it(job, distlaunch, saving):
    running = saving("TERM", options=["--grace", "100"])
    running.send_signal(signal.SIGTERM)
    job.await_signs(running, "got-TERM-0", "got-TERM-1")
    later_than_a_double()
    running.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.returncode == 143
    assert exits(result) == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    distlaunch.assert_no_survivors()


def test_a_scheduler_may_send_term_again_and_again(job, saving):
    running = saving("TERM", env={"SLURM_JOB_ID": "4711"})
    running.send_signal(signal.SIGTERM)
    job.await_signs(running, "got-TERM-0", "got-TERM-1")
    for count in (2, 3, 4):
        later_than_a_double()
        running.send_signal(signal.SIGTERM)
        running.wait_event("signal", count=count)
    job.put_sign("go")
    result = running.wait()
    assert result.returncode == 143
    assert exits(result) == {0: 0, 1: 0}


def test_int_after_term_kills_even_under_a_scheduler(job, saving):
    running = saving("TERM", env={"SLURM_JOB_ID": "4711"}, options=["--grace", "100"])
    running.send_signal(signal.SIGTERM)
    job.await_signs(running, "got-TERM-0", "got-TERM-1")
    later_than_a_double()
    running.send_signal(signal.SIGINT)
    result = running.wait()
    assert result.returncode == 143
    assert exits(result) == {0: -signal.SIGKILL, 1: -signal.SIGKILL}


def test_a_signal_during_the_stop_after_a_failure_hurries_it_and_keeps_the_cause(job, distlaunch):
    running = job.start(
        "ends.py", "--ignore", "--rank", "1", "3", options=["--failure-grace", "100"]
    )
    running.wait_event("worker_exited")
    later_than_a_double()
    running.send_signal(signal.SIGINT)
    result = running.wait()
    assert result.returncode == 130
    assert "rank 1" in result.stderr
    assert exits(result) == {0: -signal.SIGKILL, 1: 3}
    distlaunch.assert_no_survivors()


# --- to whom signals go


def test_the_data_loader_lives_while_the_worker_saves(job, saving, distlaunch):
    running = saving("TERM", "--child")
    running.send_signal(signal.SIGTERM)
    job.await_signs(running, "got-TERM-0", "got-TERM-1")
    job.put_sign("go")
    result = running.wait()
    assert exits(result) == {0: 0, 1: 0}, "9: the worker lost its data loader"
    assert job.has_sign("saved-0")
    assert job.has_sign("saved-1")
    assert not job.has_sign("child-got-TERM-0")
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_under_no_python_the_whole_group_of_the_worker_is_asked(job, name):
    words = ["--no-python", sys.executable, job.program("waits.py"), "--child", "--note", name]
    running = job.start(*words, procs=1, options=["--grace", "100"])
    job.await_ready(running, 1)
    running.send_signal(getattr(signal, f"SIG{name}"))
    job.await_signs(running, f"got-{name}-0", f"child-got-{name}-0")
    later_than_a_double()
    running.send_signal(signal.SIGINT)
    assert running.wait().returncode == 128 + getattr(signal, f"SIG{name}")


def test_usr1_reaches_the_workers_that_catch_it_and_harms_no_other(job):
    running = job.start("waits.py", "--ranks", "0,2", "--note", "USR1,USR2", "--child", procs=3)
    job.await_ready(running, 3)
    for name in ("USR1", "USR2"):
        running.send_signal(getattr(signal, f"SIG{name}"))
        job.await_signs(running, f"got-{name}-0", f"got-{name}-2")
    running.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.returncode == 143
    assert exits(result) == dict.fromkeys(range(3), -signal.SIGTERM)
    assert not job.has_sign("child-got-USR1-0"), "signals go to the worker's own process only"


def test_usr1_that_no_worker_catches_changes_nothing(job):
    running = job.start("waits.py")
    job.await_ready(running)
    running.send_signal(signal.SIGUSR1)
    running.send_signal(signal.SIGUSR2)
    running.send_signal(signal.SIGTERM)
    result = running.wait()
    assert exits(result) == {0: -signal.SIGTERM, 1: -signal.SIGTERM}
    assert result.returncode == 143


def test_a_stopped_worker_is_continued_to_obey(job, distlaunch, saving):
    running = saving("TERM", options=["--grace", "100"])
    pid = int(job.sign("ready-1"))
    os.kill(pid, signal.SIGSTOP)
    running.send_signal(signal.SIGTERM)
    job.await_signs(running, "got-TERM-0", "got-TERM-1")
    job.put_sign("go")
    result = running.wait()
    assert exits(result) == {0: 0, 1: 0}
    assert job.has_sign("saved-1")


def test_tstp_where_no_shell_could_continue_us_does_not_leave_the_workers_stopped(job, distlaunch):
    """In an orphaned process group the kernel stops no process on TSTP."""
    running = job.start("waits.py", "--note", "CONT", start_new_session=True)
    workers = job.await_ready(running)
    running.send_signal(signal.SIGTSTP)
    job.await_signs(running, "got-CONT-0", "got-CONT-1")
    assert all(job.state_of(pid) != "T" for pid in workers)
    running.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.returncode == 143
    assert exits(result) == {0: -signal.SIGTERM, 1: -signal.SIGTERM}
    distlaunch.assert_no_survivors()


def test_a_stopped_spawner_is_woken_and_a_workers_end_is_seen(job, distlaunch):
    running = job.start("waits.py", "--note", "CONT")
    workers = job.await_ready(running)
    spawner = int(Path(f"/proc/{workers[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(spawner, signal.SIGSTOP)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    assert running.wait().returncode == 128 + signal.SIGKILL
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize(
    "gap_ms", [5, 20, 60]
)  # at 0 CONT may come between our last look and our stop
def test_cont_soon_after_tstp_leaves_nobody_stopped(job, distlaunch, gap_ms):
    running = job.start("waits.py", "--note", "CONT")
    workers = job.await_ready(running)
    running.send_signal(signal.SIGTSTP)
    time.sleep(gap_ms / 1000)
    running.send_signal(signal.SIGCONT)
    running.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.returncode == 143
    assert exits(result) == {0: -signal.SIGTERM, 1: -signal.SIGTERM}
    assert len(workers) == 2
    distlaunch.assert_no_survivors()


# --- before and around the start


@pytest.mark.parametrize("delay_ms", range(0, 200, 20))
def test_term_at_any_moment_of_the_start_ends_the_job(job, distlaunch, delay_ms):
    running = job.start("waits.py")
    time.sleep(delay_ms / 1000)
    running.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.returncode in (128 + signal.SIGTERM, -signal.SIGTERM)
    assert "internal error" not in result.stderr
    job.until(lambda: not distlaunch.survivors(), "all that was started has ended")


@pytest.mark.parametrize("delay_ms", range(0, 60, 6))
def test_int_at_any_moment_of_a_jobs_start_ends_it_with_130_and_no_traceback(
    job, distlaunch, delay_ms
):
    running = job.start(
        "waits.py", options=["--grace", "1"]
    )  # Python itself loses an INT now and then while it begins
    job.until(
        lambda: running.run_dir, "the run directory"
    )  # before that, Python itself may not be up yet
    time.sleep(delay_ms / 1000)
    running.send_signal(signal.SIGINT)
    result = running.wait()
    assert result.returncode == 130
    assert "internal error" not in result.stderr
    launchers_own = [line for line in result.stderr.splitlines() if not line.startswith("[")]
    assert not any("Traceback" in line for line in launchers_own), result.stderr
    job.until(lambda: not distlaunch.survivors(), "all that was started has ended")


def test_no_signal_is_lost_while_the_handlers_are_installed():
    """Each one comes at once after the process has a handler for it."""
    source = """
import os, signal
from distlaunch.coordinator.runtime.signal_pipe import ENDING, SignalPipe

install = signal.signal
def install_and_send(number, handler):
    install(number, handler)
    os.kill(os.getpid(), number)
signal.signal = install_and_send
print(set(SignalPipe().read()) >= set(ENDING))
"""
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


# --- signals that reach the workers' parent


@pytest.mark.parametrize("name", ["TERM", "HUP", "INT", "QUIT"])
def test_a_worker_that_signals_its_parent_ends_the_job(job, distlaunch, name):
    running = job.start("signals_parent.py", name, "1")
    job.await_ready(running)
    job.put_sign("tell")
    result = running.wait()
    assert result.returncode == 128 + getattr(signal, f"SIG{name}"), result.stderr
    assert [event["signal"] for event in result.of_type("signal")] == [f"SIG{name}"]
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("name", ["USR1", "USR2"])
def test_usr1_and_usr2_of_a_worker_at_its_parent_reach_all_workers(job, distlaunch, name):
    running = job.start("signals_parent.py", name, "1")
    job.await_ready(running)
    job.put_sign("tell")
    job.await_signs(running, f"got-{name}-0", f"got-{name}-1")
    running.send_signal(signal.SIGTERM)
    assert running.wait().returncode == 143
    distlaunch.assert_no_survivors()


def test_hup_at_the_workers_parent_is_ignored_under_nohup(job, distlaunch):
    running = job.start(
        "signals_parent.py",
        "HUP",
        "1",
        preexec=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    job.await_ready(running)
    job.put_sign("tell")
    spawner = job.spawner_of(running)
    os.kill(spawner, signal.SIGUSR1)  # comes later, so HUP has been dealt with when it shows
    job.await_signs(running, "got-USR1-0", "got-USR1-1")
    running.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.returncode == 143
    assert [event["signal"] for event in result.of_type("signal")] == ["SIGUSR1", "SIGTERM"]
    distlaunch.assert_no_survivors()


def test_term_at_all_processes_of_a_job_at_once_is_one_signal(job, distlaunch, saving):
    """As systemd and Slurm send it: a second one would kill the workers before they have saved."""
    running = saving("TERM")
    workers = [int(job.sign(f"ready-{rank}")) for rank in (0, 1)]
    for pid in (running.pid, job.watcher_of(running), job.spawner_of(running), *workers):
        os.kill(pid, signal.SIGTERM)
    job.await_signs(running, "got-TERM-0", "got-TERM-1")
    running.wait_event("signal")
    os.kill(
        job.spawner_of(running), signal.SIGUSR1
    )  # comes later, so TERM has been dealt with when it shows
    running.wait_for(
        lambda: any(event.get("signal") == "SIGUSR1" for event in running.events), "USR1"
    )
    job.put_sign("go")
    result = running.wait()
    assert result.returncode == 143
    assert exits(result) == {0: 0, 1: 0}
    assert [event["signal"] for event in result.of_type("signal")] == ["SIGTERM", "SIGUSR1"]
    distlaunch.assert_no_survivors()
