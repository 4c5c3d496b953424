from __future__ import annotations

import fcntl
import os
import random
from itertools import pairwise

import pytest

from distlaunch.core.agent.workers import log_files as writer
from distlaunch.core.agent.workers.log_files import LogFiles
from distlaunch.core.model.log_times import Mark, unpack_marks
from distlaunch.core.model.run_files import (
    BEFORE,
    CONSOLE,
    STDERR,
    STDOUT,
    TORCHRUN,
    TRAIN,
    times_path,
)
from distlaunch.jobs.console_log import ConsoleLog
from distlaunch.jobs.job import read_job
from distlaunch.jobs.worker_logs import LogFollower, attempts_of, last_lines, log_files, read_lines


@pytest.fixture
def clock(monkeypatch):
    """Return the time of day in seconds, as a list of one number that tests change."""
    now = [1_000.0]
    monkeypatch.setattr(writer.time, "time", lambda: now[0])
    return now


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / ".distlaunch-run").write_text("job")
    (tmp_path / "attempt-0").mkdir()
    return tmp_path


def write(run_dir, clock, chunks, layout=TRAIN) -> None:
    """Write chunks: seconds after the start, rank, bytes."""
    logs = LogFiles(str(run_dir), 0, pytest.fail, layout=layout)
    begun = clock[0]
    for when, rank, data in chunks:
        clock[0] = begun + when
        logs.output(rank, STDOUT, data, when)
    for rank in {rank for _, rank, _ in chunks}:
        logs.rank_ended(rank, 0.0)


def texts(lines) -> list[bytes]:
    return [line.text for line in lines]


def test_lines_of_several_ranks_are_merged_by_time(run_dir, clock):
    write(
        run_dir,
        clock,
        [(0, 0, b"a\n"), (2, 1, b"b\n"), (4, 0, b"c\n"), (6, 1, b"d\n"), (8, 0, b"e")],
    )
    job = read_job(str(run_dir))
    assert texts(read_lines(job, 0, None)) == [b"a", b"b", b"c", b"d", b"e"]
    assert texts(read_lines(job, 0, {1})) == [b"b", b"d"]
    assert texts(last_lines(job, 0, None, 3)) == [b"c", b"d", b"e"]
    assert texts(read_lines(job, 0, None, since=1_005.5)) == [b"d", b"e"]


def test_a_line_that_comes_in_parts_is_one_line(run_dir, clock):
    write(run_dir, clock, [(0, 0, b"first "), (2, 1, b"other\n"), (4, 0, b"half\nlast\n")])
    job = read_job(str(run_dir))
    assert texts(read_lines(job, 0, None)) == [b"other", b"first half", b"last"]


def test_no_line_is_lost_and_the_order_of_a_rank_stays(run_dir, clock):
    choose = random.Random(7)
    chunks, when = [], 0.0
    for number in range(2_000):
        when += choose.random()
        chunks.append((when, choose.randrange(4), f"{number:05d}\n".encode()))
    write(run_dir, clock, chunks)
    job = read_job(str(run_dir))
    lines = list(read_lines(job, 0, None))
    assert sorted(texts(lines)) == [data.strip() for _, _, data in chunks]
    for rank in range(4):
        own = [line.text for line in lines if line.rank == rank]
        assert own == sorted(own)
    times = {data.strip(): when for when, _, data in chunks}
    shown = [times[line.text] for line in lines]
    assert all(after > before - 2.0 for before, after in pairwise(shown))
    for count in (0, 1, 7, 100, 5_000):
        ended = texts(last_lines(job, 0, None, count))
        assert ended == (texts(lines)[-count:] if count else [])


def test_a_follower_and_what_was_written_before_it_have_each_line_once(run_dir, clock):
    write(run_dir, clock, [(0, 0, b"a\nhal"), (2, 1, b"b\n")])
    job = read_job(str(run_dir))
    follower = LogFollower(job, None)
    ends = follower.ends
    write(run_dir, clock, [(4, 0, b"f\nc\n"), (5, 2, b"new\n")])
    (run_dir / "events.jsonl").write_text('{"type": "job_ended", "exit_code": 0}\n')
    assert texts(read_lines(job, 0, None, ends=ends)) == [b"a", b"b"]
    assert texts(last_lines(job, 0, None, 1, ends=ends)) == [b"b"]
    assert texts(follower.lines()) == [b"half", b"c", b"new"]


def test_a_follower_reads_each_attempt_to_its_end_before_the_next(run_dir, clock):
    write(run_dir, clock, [(0, 0, b"a\n")])
    lines = LogFollower(read_job(str(run_dir)), None).lines()
    log = run_dir / "attempt-0" / "rank-0.log"
    with open(run_dir / "events.jsonl", "a") as events:
        fcntl.flock(events, fcntl.LOCK_EX)  # as the launcher of a job that runs
        with open(log, "ab") as file:
            file.write(b"step\n")
        assert next(lines).text == b"step"
        with open(log, "ab") as file:
            file.write(b"Traceback\nValueError")
        for attempt, text in [(1, b"short\n"), (2, b"newest\n")]:
            (run_dir / f"attempt-{attempt}").mkdir()
            (run_dir / f"attempt-{attempt}" / "rank-0.log").write_bytes(text)
        assert [next(lines).text for _ in range(4)] == [
            b"Traceback",
            b"ValueError",
            b"short",
            b"newest",
        ]
        with open(log.parents[1] / "attempt-1" / "rank-0.log", "ab") as file:
            file.write(b"late\n")
        assert next(lines).text == b"late"
        events.write('{"type": "job_ended", "exit_code": 0}\n')
    assert list(lines) == []


def test_files_of_one_rank_are_read_without_an_index(run_dir, clock):
    write(run_dir, clock, [(0, 0, b"a\n"), (5, 1, b"b\n")])
    (run_dir / "times-0.index").unlink()
    assert sorted(texts(read_lines(read_job(str(run_dir)), 0, None))) == [b"a", b"b"]


@pytest.mark.parametrize("damage", [b"\xff" * 24, b"\0" * 24 * 5, b"cut"])
def test_a_damaged_index_loses_no_line(run_dir, clock, damage):
    write(run_dir, clock, [(0, 0, b"a\n"), (2, 1, b"b\n"), (4, 0, b"c\n")])
    index = run_dir / "times-0.index"
    index.write_bytes(damage + index.read_bytes())
    assert sorted(texts(read_lines(read_job(str(run_dir)), 0, None))) == [b"a", b"b", b"c"]


def test_streams_with_files_of_their_own_have_marks_of_their_own(run_dir, clock):
    (run_dir / "attempt-0").rmdir()
    (run_dir / "attempt_0" / "0").mkdir(parents=True)
    logs = LogFiles(str(run_dir), 0, pytest.fail, layout=TORCHRUN)
    logs.output(0, STDERR, b"warning\n", 0.0)
    clock[0] += 3
    logs.output(0, STDOUT, b"step\n", 3.0)
    logs.rank_ended(0, 3.0)
    job = read_job(str(run_dir))
    assert attempts_of(job) == [0]
    assert [file.stream for file in log_files(job, 0)] == [STDOUT, STDERR]
    assert texts(read_lines(job, 0, None)) == [b"warning", b"step"]


def test_the_index_has_at_most_one_mark_for_a_file_and_second(run_dir, clock):
    write(run_dir, clock, [(number / 100, 0, b"x\n") for number in range(1_000)])
    marks = list(unpack_marks((run_dir / "times-0.index").read_bytes()))
    assert 9 <= len(marks) <= 11
    assert marks[0] == Mark(time=1_000.0, rank=0, stream=0, offset=0)


@pytest.mark.parametrize("kind", ["fifo", "device", "zeros"])
def test_an_index_that_no_launcher_wrote_is_not_waited_for_nor_kept(run_dir, clock, kind):
    write(run_dir, clock, [(0, 0, b"a\n"), (2, 1, b"b\n")])
    index = times_path(str(run_dir), 0)
    os.unlink(index)
    match kind:
        case "fifo":
            os.mkfifo(index)
        case "device":
            os.symlink("/dev/zero", index)
        case _:
            with open(index, "wb") as file:
                file.truncate(1 << 20)
    assert sorted(texts(read_lines(read_job(str(run_dir)), 0, None))) == [b"a", b"b"]


@pytest.mark.parametrize("kind", ["fifo", "link", "directory"])
def test_a_console_that_is_no_regular_file_is_refused(run_dir, kind):
    console = run_dir / CONSOLE
    match kind:
        case "fifo":
            os.mkfifo(console)
        case "link":
            console.symlink_to("/dev/zero")
        case _:
            console.mkdir()
    with pytest.raises(OSError, match=r"\w") as caught:
        ConsoleLog(read_job(str(run_dir)))
    assert not isinstance(caught.value, FileNotFoundError)


def test_the_console_is_read_on_in_the_file_that_follows_a_full_one(run_dir):
    console = run_dir / CONSOLE
    console.write_text("first")
    log = ConsoleLog(read_job(str(run_dir)))
    log.advance(len(log.read()))
    console.rename(f"{console}{BEFORE}")
    with (run_dir / f"{CONSOLE}{BEFORE}").open("a") as file:
        file.write(" late")
    assert log.read() == b" late"  # before the new file is there
    log.advance(len(b" late"))
    assert log.read() == b""
    console.write_text("second")
    assert log.read() == b"second"
    log.close()
