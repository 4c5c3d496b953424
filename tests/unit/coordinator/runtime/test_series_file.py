"""Writing the file of steps: how often, how large, and on a full disk."""

from __future__ import annotations

import errno
import os

import pytest

from distlaunch.coordinator.runtime import series_file
from distlaunch.coordinator.runtime.records import DiskWork
from distlaunch.coordinator.runtime.series_file import PERIOD_S, SeriesFile
from distlaunch.core.model.step_series import split_blocks, unpack_block
from distlaunch.core.protocol import agent_messages as m

TIME = 1_800_000_000.0


class Series:
    """A file of steps, written on a clock of the test."""

    def __init__(self, path, **settings) -> None:
        self.path = path
        self.now = 0.0
        self.file = SeriesFile(str(path), DiskWork(), **settings)

    def report(self, step: float, *, ranks=range(2), attempt: int = 0) -> None:
        beats = [m.Heartbeat(rank=rank, values={"step": step, "loss": 1 / 4}) for rank in ranks]
        self.file.add(attempt, beats, now=self.now, time=TIME + self.now)

    def at(self, now: float) -> None:
        """Advance the clock, and write what is due by then."""
        self.now = now
        if self.file.due is not None and now >= self.file.due:
            self.file.write(now)

    def read(self) -> list[list[tuple[int, int, float | None]]]:
        found = [unpack_block(block) for block in split_blocks(self.path.read_bytes())]
        return [[(attempt, row[0], row[2]) for row in rows] for attempt, rows in found]


@pytest.fixture
def series(tmp_path):
    made = Series(tmp_path / "steps.bin")
    yield made
    made.file.close()


def test_reports_of_one_period_become_one_block_with_the_newest_of_each_rank(series):
    series.report(1, ranks=[1])
    series.report(2, ranks=[0, 1])
    series.report(3, ranks=[0, 1])
    series.at(PERIOD_S)
    assert series.read() == [[(0, 0, 2.0), (0, 1, 1.0)], [(0, 0, 3.0), (0, 1, 3.0)]], (
        "the first one stays"
    )
    assert series.file.due is None
    series.report(3)
    assert series.file.due == pytest.approx(2 * PERIOD_S), "one block a period"


def test_a_new_attempt_begins_a_new_block(series):
    series.report(7)
    series.report(1, attempt=1, ranks=[0])
    series.file.write(1.0)
    assert series.read() == [[(0, 0, 7.0), (0, 1, 7.0)], [(1, 0, 1.0)]]


def test_ranks_are_counted_from_that_of_an_outer_launcher(tmp_path):
    series = Series(tmp_path / "steps.bin", first_rank=4)
    series.report(1, ranks=[0])
    series.file.write(1.0)
    series.file.close()
    assert series.read() == [[(0, 4, 1.0)]]


def test_the_file_stays_below_its_limit_and_covers_the_whole_job(tmp_path):
    limit = 8000
    series = Series(tmp_path / "steps.bin", most_bytes=limit)
    for second in range(2000):
        series.at(float(second))
        series.report(second)
        assert not series.path.exists() or series.path.stat().st_size <= limit
    series.file.close()
    steps = [rows[0][2] for rows in series.read()]
    assert steps[0] < 100
    assert steps[-1] > 1800
    assert steps == sorted(steps)
    assert len(steps) > 40


def test_many_short_attempts_drop_the_oldest(tmp_path):
    series = Series(tmp_path / "steps.bin", most_bytes=4000)
    for attempt in range(500):
        series.report(1, attempt=attempt)
    series.file.write(1.0)
    series.file.close()
    found = series.read()
    assert series.path.stat().st_size <= 4000
    assert found[-1][0][0] == 499


def test_a_coordinator_that_continues_a_job_appends_behind_the_last_complete_block(tmp_path):
    path = tmp_path / "steps.bin"
    first = Series(path)
    first.report(1)
    first.file.write(1.0)
    first.file.close()
    with path.open("ab") as file:
        file.write(b"DLSB cut by kill -9")
    second = Series(path)
    second.report(2, attempt=1)
    second.file.write(1.0)
    second.file.close()
    assert [rows[0] for rows in second.read()] == [(0, 0, 1.0), (1, 0, 2.0)]


def test_a_full_disk_loses_blocks_and_no_more(series, monkeypatch):
    series.report(1)
    series.file.write(1.0)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(series_file.os, "pwrite", full)
        series.report(2)
        series.file.write(2.0)
    series.report(3)
    series.file.write(3.0)
    assert [rows[0][2] for rows in series.read()] == [1.0, 3.0]


def test_a_full_disk_does_not_make_the_period_longer(tmp_path, monkeypatch):
    series = Series(tmp_path / "steps.bin", most_bytes=400)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(series_file.os, "posix_fallocate", full)
    for second in range(50):
        series.report(second)
        series.file.write(float(second))
        series.now = float(second)
    series.report(51)
    assert series.file.due == pytest.approx(49 + PERIOD_S)
    series.file.close()


def test_a_directory_that_is_gone_is_no_error(tmp_path):
    series = Series(tmp_path / "gone" / "steps.bin")
    series.report(1)
    series.file.write(1.0)
    series.file.close()
    assert not series.path.exists()
