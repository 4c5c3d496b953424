"""Output of workers that save after their launcher was killed."""

from __future__ import annotations

import os
import signal

import pytest

from tests.process.conftest import until

SIZES = pytest.mark.parametrize("size", [64, 1 << 20], ids=["one line", "1 MB"])


def log_of(running, rank: int) -> str:
    assert running.run_dir is not None
    return (running.run_dir / "attempt-0" / f"rank-{rank}.log").read_text()


def assert_saved(job, running, size: int, ranks=(0, 1)) -> None:
    """Check that all ranks have saved, and wait until their logs hold every byte."""
    for rank in ranks:
        assert job.has_sign(f"saved-{rank}"), log_of(running, rank)
        words = (f"saving {rank}".ljust(63, "."), f"saved {rank}", f"done {rank}")
        wait_counts(running, rank, words, [size // 64, 1, 1])


def wait_counts(running, rank: int, words: tuple[str, ...], counts: list[int]) -> None:
    until(lambda: [*map(log_of(running, rank).count, words)] == counts, "all in the log")


@SIZES
def test_a_worker_that_prints_after_kill_9_of_the_launcher_saves(job, distlaunch, size):
    running = job.start("prints_at_the_end.py", str(size), options=["--failure-grace", "60"])
    job.await_ready(running)
    running.process.kill()
    assert running.wait().returncode == -signal.SIGKILL
    distlaunch.assert_no_survivors(within_s=60)
    assert_saved(job, running, size)


def test_a_warm_worker_that_prints_after_kill_9_of_the_launcher_saves(warm, job, distlaunch):
    running = warm("prints_at_the_end.py", "1048576", options=["--failure-grace", "60"])
    job.await_ready(running)
    running.process.kill()
    assert running.wait().returncode == -signal.SIGKILL
    distlaunch.assert_no_survivors(within_s=60)
    assert_saved(job, running, 1 << 20)


def test_both_streams_go_on_where_the_layout_has_a_file_for_each(job, distlaunch):
    words = [
        "torchrun",
        "--nproc-per-node",
        "2",
        "--log-dir",
        "logs",
        job.program("prints_at_the_end.py"),
        "64",
    ]
    running = distlaunch.start(words)
    job.await_ready(running)
    running.process.kill()
    assert running.wait().returncode == -signal.SIGKILL
    distlaunch.assert_no_survivors(within_s=60)
    assert job.has_sign("saved-0")
    out = distlaunch.work / "logs" / "latest" / "attempt_0" / "0" / "stdout.log"
    until(lambda: out.read_text().splitlines()[-1] == "saved 0", "all that rank 0 printed")
    until(
        lambda: (out.parent / "stderr.log").read_text() == "done 0\n",
        "all that rank 0 wrote to stderr",
    )


def test_a_worker_that_saves_at_ctrl_c_is_not_ended_by_term_when_the_launcher_is_killed(
    job, distlaunch
):
    """As Python's ``subprocess.run`` does it: KILL comes a quarter of a second after Ctrl-C."""
    running = job.start("waits.py", "--save", "INT", options=["--failure-grace", "60"])
    job.await_ready(running)
    running.send_signal(signal.SIGINT)
    job.await_signs(running, "got-INT-0", "got-INT-1")
    spawner = job.spawner_of(running)
    running.process.kill()
    running.wait()
    until(
        lambda: len(os.listdir(f"/proc/{spawner}/task")) == 2,
        "the spawner, that it acts in the launcher's place",
    )
    job.put_sign("go")
    until(lambda: job.has_sign("saved-0") and job.has_sign("saved-1"), "both workers have saved")
    distlaunch.assert_no_survivors()
