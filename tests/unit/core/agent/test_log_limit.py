"""Log files with a limit: the first half and the last part stay, and readers see the gap."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from distlaunch.core.agent.workers.log_files import LogFiles
from distlaunch.core.model import log_limit
from distlaunch.core.model.record import replace
from distlaunch.core.model.run_files import STDERR, STDOUT, TORCHRUN, TRAIN
from distlaunch.jobs.job import Job, read_job
from distlaunch.jobs.worker_logs import LogFollower, last_lines, read_lines

LIMIT = 64 << 10
LIMITED = replace(TRAIN, log_bytes=LIMIT)


def line(number: int) -> bytes:
    return b"line %09d %s\n" % (number, b"x" * 80)


SIZE = len(line(0))


@pytest.fixture
def run_dir(tmp_path) -> Path:
    (tmp_path / ".distlaunch-run").write_text("job")
    (tmp_path / "attempt-0").mkdir()
    return tmp_path


def job_of(run_dir: Path) -> Job:
    job = read_job(str(run_dir))
    assert job is not None
    return replace(job, log_bytes=LIMIT)


def write(
    logs: LogFiles, first: int, count: int, *, rank: int = 0, each_s: float = 0.0, at: int = 1
) -> None:
    """Write lines in chunks of ``at``."""
    for number in range(first, first + count, at):
        chunk = b"".join(line(each) for each in range(number, min(number + at, first + count)))
        logs.output(rank, STDOUT, chunk, number * each_s)


def numbers(data: bytes) -> list[int]:
    return [int(each.split()[1]) for each in data.splitlines() if each.startswith(b"line ")]


@pytest.mark.parametrize("at", [1, 7, 100, 3000])
def test_the_first_half_and_the_last_part_stay_and_the_notice_counts_what_is_left_out(run_dir, at):
    reached: list[int] = []
    logs = LogFiles(str(run_dir), 0, pytest.fail, layout=LIMITED, on_limit=reached.append)
    write(logs, 0, 5000, at=at)
    path = run_dir / "attempt-0" / "rank-0.log"
    data = path.read_bytes()
    assert len(data) < LIMIT + at * SIZE
    assert data[: LIMIT // 2] == b"".join(map(line, range(5000)))[: LIMIT // 2]
    kept = numbers(data[LIMIT // 2 + log_limit.NOTICE_BYTES :])
    assert kept == list(range(kept[0], 5000)), "the last part is whole and ends with the last line"
    assert len(kept) * SIZE >= LIMIT // 4 - 4096
    with path.open("rb") as file:
        gap = log_limit.find_gap(file.fileno(), LIMIT)
    assert gap is not None
    assert gap.left_out + len(data) - log_limit.NOTICE_BYTES == 5000 * SIZE
    assert reached == [0], "said once"
    logs.rank_ended(0, 0.0)


def test_without_a_limit_and_below_it_every_byte_is_kept(run_dir):
    for layout, count in ((TRAIN, 5000), (LIMITED, LIMIT // SIZE - 1)):
        logs = LogFiles(str(run_dir), 0, pytest.fail, layout=layout, on_limit=pytest.fail)
        write(logs, 0, count)
        logs.rank_ended(0, 0.0)
        path = run_dir / "attempt-0" / "rank-0.log"
        assert path.read_bytes() == b"".join(map(line, range(count)))
        path.unlink()


def test_each_file_of_a_rank_has_its_own_limit(run_dir):
    (run_dir / "attempt_0" / "0").mkdir(parents=True)
    layout = replace(TORCHRUN, log_bytes=LIMIT)
    logs = LogFiles(str(run_dir), 0, pytest.fail, layout=layout)
    for number in range(3000):
        logs.output(0, STDERR, line(number), 0.0)
    logs.output(0, STDOUT, line(1), 0.0)
    logs.rank_ended(0, 0.0)
    assert (run_dir / "attempt_0" / "0" / "stderr.log").stat().st_size < LIMIT + SIZE
    assert (run_dir / "attempt_0" / "0" / "stdout.log").read_bytes() == line(1)


def test_another_process_continues_a_file_that_has_a_gap(run_dir):
    first = LogFiles(str(run_dir), 0, pytest.fail, layout=LIMITED)
    write(first, 0, 2000)
    first.rank_ended(0, 0.0)
    second = LogFiles(str(run_dir), 0, pytest.fail, layout=LIMITED)
    write(second, 2000, 2000)
    second.rank_ended(0, 0.0)
    data = (run_dir / "attempt-0" / "rank-0.log").read_bytes()
    assert data.count(b"left out here") == 1
    left_out = int(data[LIMIT // 2 :].split(b"left out")[0].split()[1])
    assert left_out + len(data) - log_limit.NOTICE_BYTES == 4000 * SIZE
    assert numbers(data)[-1] == 3999


def test_a_kill_while_the_middle_is_left_out_leaves_the_first_and_the_last_part(
    run_dir, monkeypatch
):
    path = run_dir / "attempt-0" / "rank-0.log"
    path.write_bytes(b"".join(map(line, range(800))))
    size = path.stat().st_size
    descriptor = os.open(path, os.O_RDWR)
    write_at = os.pwrite
    monkeypatch.setattr(log_limit, "_BLOCK", 1000)
    for writes in range(12):
        left = [writes]

        def killed(*call, left=left) -> int:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return write_at(*call)

        with monkeypatch.context() as patch:
            patch.setattr(log_limit.os, "pwrite", killed)
            with pytest.raises(KeyboardInterrupt):
                log_limit.shorten(descriptor, size, LIMIT, None)
        data = path.read_bytes()
        assert data[: LIMIT // 2] == b"".join(map(line, range(800)))[: LIMIT // 2]
        assert numbers(data[-LIMIT // 4 :])[-1] == 799
    os.close(descriptor)


def test_lines_of_ranks_are_merged_by_time_on_both_sides_of_a_gap(run_dir, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("distlaunch.core.agent.workers.log_files.time.time", lambda: now[0])
    logs = LogFiles(str(run_dir), 0, pytest.fail, layout=LIMITED)
    for number in range(4000):
        now[0] = 1000.0 + number
        logs.output(0, STDOUT, line(number), float(number))
        if number % 100 == 0:
            logs.output(1, STDOUT, b"mark %d\n" % number, float(number))
    for rank in (0, 1):
        logs.rank_ended(rank, 0.0)
    shown = [each.text for each in read_lines(job_of(run_dir), 0, None)]
    after = shown[shown.index(b"mark 3900") - 1 : shown.index(b"mark 3900") + 2]
    assert [each.split()[1] for each in after] == [b"000003900", b"3900", b"000003901"]
    before = shown.index(b"mark 100")
    assert shown[before - 1].split()[1] == b"000000100"
    assert sum(b"left out here" in each for each in shown) == 1
    assert [each.text for each in last_lines(job_of(run_dir), 0, {0}, 1)] == [line(3999)[:-1]]
    recent = [each.text for each in read_lines(job_of(run_dir), 0, {0}, since=1000.0 + 3990)]
    assert numbers(b"\n".join(recent))[0] in (3989, 3990)


def test_a_follower_continues_where_it_was_and_sees_the_notice_where_it_was_too_slow(run_dir):
    with (run_dir / "events.jsonl").open("w") as events:
        fcntl.flock(events, fcntl.LOCK_EX)  # as a launcher that runs
        logs = LogFiles(str(run_dir), 0, pytest.fail, layout=LIMITED)
        write(logs, 0, 400)
        follower = LogFollower(job_of(run_dir), None)
        write(logs, 400, 500)
        lines = follower.lines()
        first = next(lines).text
        write(logs, 900, 5000)
        logs.rank_ended(0, 0.0)
        events.write('{"time": 1, "type": "job_ended", "exit_code": 0}\n')
    shown = [first, *(each.text for each in lines)]
    seen = numbers(b"\n".join(shown))
    assert seen == sorted(set(seen)), "no line twice"
    assert seen[0] >= 400
    assert seen[-1] == 5899
    assert any(b"left out here" in each for each in shown)
