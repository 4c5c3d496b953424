"""Output for slow, closed or missing readers."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import time
from pathlib import Path

import pytest

from tests.process.outputs import FLOOD, LINES, log_of, numbered, script, unfolded


@pytest.fixture
def pipe():
    """Yield a pipe's ends. What the test has not closed is closed after it."""
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue


def read_all(descriptor: int) -> bytes:
    parts = []
    while part := os.read(descriptor, 1 << 16):
        parts.append(part)
    return b"".join(parts)


def assert_ends_unread(distlaunch, running, pipe, code: int) -> None:
    """Check that the job ends while nobody reads, and the launcher once its output has been
    read."""
    running.wait_event("job_ended")
    assert distlaunch.holding() == []
    os.close(pipe[1])
    read_all(pipe[0])
    assert running.wait(30).returncode == code
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("stream", ["1", "2"], ids=["stdout", "stderr"])
@pytest.mark.parametrize("words", [[], ["--format", "jsonl"]], ids=["plain", "jsonl"])
def test_a_failure_ends_the_job_though_nobody_reads_the_pipe(distlaunch, pipe, stream, words):
    args = ["--num-procs", "2", "--failure-grace", "0.1", *words, FLOOD, "9", stream]
    running = distlaunch.start(["train", *args], stdout=pipe[1], stderr=pipe[1])
    assert_ends_unread(distlaunch, running, pipe, 9)
    assert "exit code 9" in (running.run_dir / "report.txt").read_text()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_the_job_though_nobody_reads_the_pipe(distlaunch, pipe, number, code):
    running = distlaunch.start(
        ["train", "--num-procs", "2", "--grace", "0.1", FLOOD, "wait"],
        stdout=pipe[1],
        stderr=pipe[1],
    )
    running.wait_for(lambda: running.run_dir and (running.run_dir / "full").exists(), "full pipe")
    running.send_signal(number)
    assert_ends_unread(distlaunch, running, pipe, code)


def test_the_launcher_of_a_job_that_failed_ends_though_nobody_ever_reads_the_pipe(distlaunch, pipe):
    args = ["--num-procs", "2", "--failure-grace", "0.1", FLOOD, "9"]
    assert distlaunch.train(*args, timeout=60, stdout=pipe[1], stderr=pipe[1]).returncode == 9
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("words", [[], ["--format", "jsonl"]], ids=["plain", "jsonl"])
def test_the_report_comes_through_a_pipe_whose_reader_is_slow(distlaunch, pipe, words):
    """3 MB are queued for a reader of some kB/s when the job fails: all messages of the launcher
    still come."""
    count = 30_000
    fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, 4096)  # what the pipe holds is read first
    args = ["--num-procs", "1", *words, LINES, str(count), "80", "7"]
    running = distlaunch.start(["train", *args], stdout=pipe[1], stderr=pipe[1])
    os.close(pipe[1])
    parts = []
    while part := os.read(pipe[0], 512):
        parts.append(part)
        time.sleep(0.1)  # this is the slow reader
    result = running.wait(30)
    assert result.returncode == 7
    lines = b"".join(parts).decode().splitlines()
    if words:
        records = [json.loads(line) for line in lines]
        shown = sum(record["type"] == "output" for record in records)
        lines = [
            line
            for record in records
            if record["type"] == "message"
            for line in record["text"].splitlines()
        ]
        assert records[-1]["type"] == "job_ended"
        assert any(record["type"] == "failure" for record in records)
    else:
        shown = sum(line.startswith("[0] ") for line in lines)
    report = (result.run_dir / "report.txt").read_text().splitlines()
    assert {line.removeprefix("distlaunch: ") for line in report} <= {
        line.removeprefix("distlaunch: ") for line in lines
    }
    [dropped] = [
        re.search(r"([\d,]+) lines of workers not shown", line)
        for line in lines
        if "not shown" in line
    ]
    assert shown + int(dropped[1].replace(",", "")) == count
    assert len(log_of(result, 0).splitlines()) == count


def test_kill_9_leaves_nothing_though_nobody_reads_the_pipe(distlaunch, pipe):
    running = distlaunch.start(
        ["train", "--num-procs", "2", "--failure-grace", "1", FLOOD, "wait"],
        stdout=pipe[1],
        stderr=pipe[1],
    )
    running.wait_for(lambda: running.run_dir and (running.run_dir / "full").exists(), "full pipe")
    running.send_signal(signal.SIGKILL)
    running.wait()
    distlaunch.assert_no_survivors()


def test_a_pipe_that_is_read_late_slows_the_workers_and_loses_nothing(distlaunch, pipe):
    count, width = 40_000, 300  # 12 MB for each of two ranks: more than all buffers together
    running = distlaunch.start(
        ["train", "--num-procs", "2", LINES, str(count), str(width)], stdout=pipe[1]
    )
    os.close(pipe[1])

    def logs() -> list[int]:
        if not running.run_dir:
            return []
        return [path.stat().st_size for path in running.run_dir.glob("attempt-0/*.log")]

    running.wait_for(
        lambda: sum(logs()) > 3 << 20, "filled buffers"
    )  # a little less than they hold
    assert running.process.poll() is None
    assert sum(logs()) < count * width * 2, "the workers wait for the reader"
    lines = unfolded(read_all(pipe[0]))
    assert running.wait().returncode == 0
    for rank in (0, 1):
        assert lines[rank] == numbered(rank, count, width)
        assert len(log_of(running, rank).splitlines()) == count


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_launcher_that_waits_for_its_reader_alone_can_be_ended(distlaunch, pipe, number):
    running = distlaunch.start(["train", "--num-procs", "2", LINES, "9000", "100"], stdout=pipe[1])
    running.wait_event("job_ended")
    assert running.process.poll() is None, "what is not read yet keeps it"
    running.send_signal(number)
    assert running.wait().returncode == 0, "all workers have ended with 0"


def test_400_000_lines_through_a_slow_reader_are_all_there_and_memory_stays_flat(distlaunch, pipe):
    count, width = 200_000, 150  # 62 MB of text, which would not be within the bound
    running = distlaunch.start(
        ["train", "--num-procs", "2", LINES, str(count), str(width)], stdout=pipe[1]
    )
    os.close(pipe[1])
    parts, peak_kb = [], 0
    while part := os.read(pipe[0], 2048):  # a reader with small bites
        parts.append(part)
        if len(parts) % 64 == 0 and running.process.poll() is None:
            status = Path(f"/proc/{running.pid}/status").read_text()
            peak_kb = max([peak_kb, *(int(kb) for kb in re.findall(r"VmHWM:\s+(\d+)", status))])
    assert running.wait().returncode == 0
    lines = unfolded(b"".join(parts))
    assert {rank: lines[rank] == numbered(rank, count, width) for rank in lines} == {
        0: True,
        1: True,
    }
    # The launcher itself has 22 MB. How full its buffers are depends on the load of the machine.
    assert 0 < peak_kb < 64 << 10


def test_a_reader_that_goes_away_does_not_end_the_job(distlaunch, pipe):
    running = distlaunch.start(["train", "--num-procs", "2", LINES, "50000", "100"], stdout=pipe[1])
    os.close(pipe[1])
    assert os.read(pipe[0], 64)  # | head -1
    os.close(pipe[0])
    result = running.wait()
    assert result.returncode == 0
    assert "Traceback" not in result.stderr
    for rank in (0, 1):
        assert log_of(result, rank).splitlines() == numbered(rank, 50_000, 100)


def test_a_job_runs_with_all_its_own_streams_closed(distlaunch):
    def close() -> None:
        for descriptor in range(3):
            os.close(descriptor)

    result = distlaunch.train("--num-procs", "2", LINES, "1000", "100", preexec_fn=close)
    assert result.returncode == 0
    for rank in (0, 1):
        assert log_of(result, rank).splitlines() == numbered(rank, 1000, 100)
    assert all(
        json.loads(line) for line in (result.run_dir / "events.jsonl").read_text().splitlines()
    )


def test_a_failing_job_keeps_its_exit_code_with_streams_closed(distlaunch):
    def close() -> None:
        os.close(1)
        os.close(2)

    result = distlaunch.train("--num-procs", "2", LINES, "10", "10", "6", preexec_fn=close)
    assert result.returncode == 6
    assert "exit code 6" in (result.run_dir / "report.txt").read_text()


def test_our_descriptors_are_never_made_non_blocking(distlaunch, pipe):
    watcher = script(
        distlaunch, "print(RANK, flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)"
    )
    running = distlaunch.start(
        ["train", "--num-procs", "2", watcher], stdout=pipe[1], stderr=pipe[1], stdin=pipe[0]
    )
    running.wait_workers(2)
    select.select([pipe[0]], [], [], 20)
    assert [os.get_blocking(end) for end in pipe] == [True, True]
    (distlaunch.work / "go").touch()
    assert running.wait().returncode == 0
