"""No descendant of a worker stays, however the job ends. A FIFO that all inherit proves it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

KINDS = [
    "child",
    "session",
    "daemon",
    "clean_daemon",
    "renamed",
    "new_name",
    "ignores_term",
    "stopped",
    "bomb",
    "hopping",
    "swarm",
]
SOME_KINDS = ["clean_daemon", "ignores_term", "swarm"]
"""One found by its cookie alone, one that has to be killed, and one that grows. Ends that share a
sweep need no more."""
GRACE_S = 0.5
CHAOS = Path(__file__).parents[2] / "scripts" / "chaos"


def exits(result) -> dict[int, int]:
    return {event["rank"]: event["returncode"] for event in result.of_type("worker_exited")}


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def leaving(job, kind):
    """Start two workers that have both left a process of this kind, and wait to be stopped."""

    def start(*options: str):
        running = job.start(
            "leaves.py",
            "--ranks",
            "0,1",
            kind,
            "wait",
            options=["--failure-grace", str(GRACE_S), *options],
        )
        job.await_ready(running)
        return running

    return start


# --- after ordinary ends


def test_after_a_job_that_went_well(job, distlaunch, kind):
    options = ["--linger", "0.1", "--failure-grace", str(GRACE_S)]
    result = job.run("leaves.py", "--ranks", "0,1", kind, "0", options=options)
    assert result.returncode == 0, result.stderr
    assert "distlaunch: ended " in result.stderr
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("kind", SOME_KINDS, indirect=True)
def test_after_a_failure(job, distlaunch, kind):
    result = job.run(
        "leaves.py", "--ranks", "0,1", kind, "3", options=["--failure-grace", str(GRACE_S)]
    )
    assert result.returncode == 3, result.stderr
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("kind", SOME_KINDS, indirect=True)
def test_after_term(distlaunch, leaving):
    running = leaving("--grace", str(GRACE_S))
    running.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.returncode == 143, result.stderr
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("lonely", ["session", "stopped", "bomb", "clean_daemon"])
def test_processes_that_an_ended_worker_left_run_on_and_end_with_the_others(
    job, distlaunch, lonely
):
    running = job.start("leaves.py", "--ranks", "0", lonely, "0", options=["--grace", str(GRACE_S)])
    job.await_ready(running)
    running.wait_event("worker_exited")
    assert job.is_alive(int(job.sign("left-0")))
    running.send_signal(signal.SIGTERM)
    assert exits(running.wait()) == {0: 0, 1: -signal.SIGTERM}
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("theirs", ["child", "clean_daemon", "renamed", "stopped"])
def test_processes_of_another_worker_live_on_when_a_worker_ends(job, distlaunch, theirs):
    running = job.start("leaves.py", "--ranks", "0", theirs, "check")
    job.await_ready(running)
    job.put_sign("go")  # rank 1 ends
    running.wait_event("worker_exited")
    job.put_sign("look")
    result = running.wait()
    assert exits(result) == {0: 0, 1: 0}, "rank 0 found what it had started dead before its time"
    distlaunch.assert_no_survivors()


# --- after the violent end of somebody


def test_after_kill_9_of_the_launcher(distlaunch, leaving):
    running = leaving()
    running.process.kill()
    assert running.wait().returncode == -signal.SIGKILL
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("kind", SOME_KINDS, indirect=True)
def test_after_kill_9_of_the_launchers_process_group(distlaunch, job, kind):
    options = ["--failure-grace", str(GRACE_S)]
    running = job.start(
        "leaves.py", "--ranks", "0,1", kind, "wait", options=options, start_new_session=True
    )
    job.await_ready(running)
    os.killpg(running.pid, signal.SIGKILL)
    assert running.wait().returncode == -signal.SIGKILL
    distlaunch.assert_no_survivors()


def test_after_kill_9_of_the_spawner(distlaunch, job, leaving):
    running = leaving()
    os.kill(job.spawner_of(running), signal.SIGKILL)
    result = running.wait()
    assert result.returncode == 70, result.stderr
    assert "spawner" in result.stderr
    assert "Traceback" not in result.stderr
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("kind", SOME_KINDS, indirect=True)
def test_after_kill_9_of_a_worker(distlaunch, job, leaving):
    running = leaving()
    os.kill(int(job.sign("ready-1")), signal.SIGKILL)
    result = running.wait()
    assert result.returncode == 137, result.stderr
    assert exits(result)[1] == -signal.SIGKILL
    distlaunch.assert_no_survivors()


OURS = ("launcher", "spawner", "watcher")


def kill_9(job, running, what: str) -> int:
    """Kill one of our processes, and return its pid."""
    pid = {"launcher": lambda _: running.pid, "spawner": job.spawner_of, "watcher": job.watcher_of}[
        what
    ](running)
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_job_goes_on_after_kill_9_of_the_watcher(job, distlaunch):
    running = job.start("leaves.py", "--ranks", "0,1", "clean_daemon", "wait")
    job.await_ready(running)
    watcher = kill_9(job, running, "watcher")
    job.until(lambda: not job.is_alive(watcher), "the end of the watcher")
    os.kill(job.spawner_of(running), signal.SIGSTOP)  # now it is the launcher's to let it go on
    running.send_signal(signal.SIGTERM)
    assert running.wait().returncode == 143
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(OURS, 2)))
def test_after_kill_9_of_two_of_ours_at_once(job, distlaunch, first, second):
    options = ["--failure-grace", str(GRACE_S)]
    running = job.start(
        "leaves.py", "--ranks", "0,1", "--ignore-term", "clean_daemon", "wait", options=options
    )
    job.await_ready(running)
    victims = {
        "spawner": job.spawner_of(running),
        "watcher": job.watcher_of(running),
        "launcher": running.pid,
    }
    for victim in (first, second):
        with suppress(ProcessLookupError):  # the first took it along
            os.kill(victims[victim], signal.SIGKILL)
    assert running.wait().returncode in (-signal.SIGKILL, 70)
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("second", ["spawner", "watcher"])
def test_after_kill_9_of_the_launcher_and_of_another_within_the_grace(job, distlaunch, second):
    grace_s = "60" if second == "spawner" else str(GRACE_S)
    options = ["--failure-grace", grace_s]
    running = job.start(
        "leaves.py", "--ranks", "0,1", "--ignore-term", "clean_daemon", "wait", options=options
    )
    job.await_ready(running)
    victims = {"spawner": job.spawner_of(running), "watcher": job.watcher_of(running)}
    running.process.kill()
    running.wait()
    job.until(
        lambda: job.has_sign("asked-0") and job.has_sign("asked-1"),
        "both workers were asked to end",
    )
    os.kill(victims[second], signal.SIGKILL)
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("second", ["launcher", "spawner"])
def test_after_kill_9_of_the_watcher_and_then_of_another(job, distlaunch, second):
    options = ["--failure-grace", str(GRACE_S)]
    running = job.start(
        "leaves.py", "--ranks", "0,1", "--ignore-term", "clean_daemon", "wait", options=options
    )
    job.await_ready(running)
    watcher = kill_9(job, running, "watcher")
    job.until(lambda: not job.is_alive(watcher), "the end of the watcher")
    kill_9(job, running, second)
    assert running.wait().returncode == (-signal.SIGKILL if second == "launcher" else 70)
    distlaunch.assert_no_survivors()


def test_the_watcher_has_little_memory_of_its_own(job):
    running = job.start("waits.py")
    job.await_ready(running)
    lines = Path(f"/proc/{job.watcher_of(running)}/smaps_rollup").read_text().splitlines()
    own_kb = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    assert 0 < own_kb < 2 * 1024
    running.send_signal(signal.SIGTERM)
    running.wait()


def test_workers_of_a_killed_launcher_may_save_within_the_failure_grace(job, distlaunch):
    running = job.start("waits.py", "--save", "TERM", "--child", options=["--failure-grace", "60"])
    job.await_ready(running)
    running.process.kill()
    running.process.wait()
    job.until(
        lambda: job.has_sign("got-TERM-0") and job.has_sign("got-TERM-1"),
        "both workers were asked to end",
    )
    job.put_sign("go")
    job.until(
        lambda: job.has_sign("saved-0") and job.has_sign("saved-1"), "both workers have saved"
    )
    distlaunch.assert_no_survivors()


def test_workers_of_a_killed_launcher_that_take_no_notice_are_killed(job, distlaunch):
    running = job.start(
        "waits.py", "--ignore", "TERM,HUP,INT", options=["--failure-grace", str(GRACE_S)]
    )
    job.await_ready(running)
    running.process.kill()
    running.process.wait()
    distlaunch.assert_no_survivors()


def test_stopped_workers_of_a_killed_launcher_are_continued_to_obey(job, distlaunch):
    running = job.start("waits.py", "--save", "TERM", options=["--failure-grace", "60"])
    pids = job.await_ready(running)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    running.process.kill()
    running.process.wait()
    job.until(
        lambda: job.has_sign("got-TERM-0") and job.has_sign("got-TERM-1"),
        "both workers were asked to end",
    )
    job.put_sign("go")
    distlaunch.assert_no_survivors()
    assert job.has_sign("saved-0")


def test_a_spawner_that_is_killed_during_the_stop_ends_the_job_as_a_fault(job, distlaunch):
    running = job.start("waits.py", "--ignore", "TERM", "--child", options=["--grace", "100"])
    job.await_ready(running)
    running.send_signal(signal.SIGTERM)
    running.wait_event("signal")
    os.kill(job.spawner_of(running), signal.SIGKILL)
    result = running.wait()
    assert result.returncode == 70
    distlaunch.assert_no_survivors()


def test_the_launchers_own_siblings_and_children_from_before_are_left_alone(
    job, distlaunch, tmp_path
):
    """As in a script that has a helper in the background and ends in ``exec distlaunch``."""
    helper = tmp_path / "helper"
    script = f"""
import os, signal, sys
pid = os.fork()
if pid == 0:
    os.close(1); os.close(2)
    open({str(helper)!r}, "w").write(str(os.getpid()) + "\\n")
    signal.alarm(60)
    signal.pause()
os.execv(sys.executable, [sys.executable, "-m", "distlaunch", *sys.argv[1:]])
"""
    env = {name: value for name, value in distlaunch.env.items() if name != "SURVIVOR_FIFO"}
    process = subprocess.run(
        [
            sys.executable,
            "-c",
            script,
            "train",
            "--num-procs",
            "1",
            "--format",
            "plain",
            "--no-python",
            "/bin/true",
        ],
        env=env,
        cwd=job.work,
        capture_output=True,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    # The helper may run later than the whole job.
    job.until(
        lambda: helper.exists() and helper.read_text().endswith("\n"), "the helper has told its pid"
    )
    pid = int(helper.read_text())
    try:
        assert job.is_alive(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_another_job_of_the_same_user_is_left_alone(job, distlaunch):
    options = ["--job-id", "twin", "--failure-grace", str(GRACE_S), "--log-dir"]
    mine = job.start("leaves.py", "--ranks", "0,1", "daemon", "wait", options=[*options, "mine"])
    job.await_ready(mine)
    left = [int(job.sign("left-0")), int(job.sign("left-1"))]
    for name in ("ready-0", "ready-1"):
        (job.work / name).unlink()
    other = job.start("leaves.py", "--ranks", "0,1", "daemon", "wait", options=[*options, "other"])
    workers = job.await_ready(other)
    other.process.kill()
    other.process.wait()
    job.until(
        lambda: not any(map(job.is_alive, workers)), "the workers of the killed launcher are gone"
    )
    assert all(map(job.is_alive, left))
    mine.send_signal(signal.SIGTERM)
    assert exits(mine.wait()) == {0: -signal.SIGTERM, 1: -signal.SIGTERM}
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("victim", ["outer launcher", "inner launcher", "nobody"])
def test_a_launcher_within_a_worker_goes_with_it(job, distlaunch, victim):
    inner = [sys.executable, "-m", "distlaunch", "train", "--source", "flags", "--num-procs", "2"]
    inner += ["--failure-grace", str(GRACE_S)]
    words = ["--no-python", *inner, job.program("leaves.py"), "--ranks", "0,1", "daemon", "wait"]
    outer = job.start(*words, procs=1, options=["--failure-grace", str(GRACE_S)])
    job.await_ready(outer)
    pid = outer.wait_event("workers_started")["pids"]["0"]
    if victim == "nobody":
        outer.send_signal(signal.SIGTERM)
    else:
        os.kill(outer.pid if victim == "outer launcher" else pid, signal.SIGKILL)
    assert (
        outer.wait().returncode
        == {"outer launcher": -9, "inner launcher": 137, "nobody": 143}[victim]
    )
    distlaunch.assert_no_survivors()


# --- at random instants


def test_kill_9_at_random_instants(clean_env):
    """A short form of ``scripts/chaos --kills 200``, with fixed choices."""
    done = subprocess.run(
        [sys.executable, CHAOS, "--kills", "10", "--seed", "7"],
        env=clean_env,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 kills" in done.stdout


@pytest.mark.parametrize("grace", ["5", "0"], ids=["asked", "killed"])
def test_shared_memory_of_workers_that_did_not_unlink_it_is_gone(job, grace):
    options = ["--max-restarts", "2", "--min-uptime", "0", "--failure-grace", grace]
    assert job.run("shares.py", options=options).returncode == 3
    blocks = [job.sign(name) for name in job.signs() if name.startswith("block-")]
    assert len(blocks) == 6
    assert [name for name in blocks if os.path.exists(f"/dev/shm/{name}")] == []
