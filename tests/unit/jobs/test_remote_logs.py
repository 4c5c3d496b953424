"""Logs on other nodes, read through a launcher that the tests play."""

from __future__ import annotations

import os
from base64 import b64encode

import pytest

from distlaunch.core.agent.node.log_reader import answer
from distlaunch.core.agent.workers import log_files as writer
from distlaunch.core.agent.workers.log_files import LogFiles
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import plain, replace
from distlaunch.core.model.run_files import STDOUT, TRAIN
from distlaunch.core.protocol import agent_messages as m
from distlaunch.jobs import remote_logs
from distlaunch.jobs.job import read_job
from distlaunch.jobs.other_logs import OtherLogs
from distlaunch.jobs.remote_logs import RemoteLogs
from distlaunch.jobs.worker_logs import LogFollower, last_lines, read_lines


class Launcher:
    """Answers for two nodes with ranks 1 and 2, each with a directory. Rank 0 is here."""

    def __init__(self, path, clock) -> None:
        self.clock = clock
        self.here = path / "here"
        for directory in (self.here, path / "n1", path / "n2"):
            (directory / "attempt-0").mkdir(parents=True)
        (self.here / ".distlaunch-run").write_text("job")
        self.directories = {1: str(path / "n1"), 2: str(path / "n2")}
        self.silent: set[int] = set()
        self.parts: list[m.ReadLog] = []
        self.unread: list[remote_logs.UnreadLogs] = []
        self.job = replace(read_job(str(self.here)), launchers=True)
        self.logs = RemoteLogs(self.job, self.unread.append)

    def write(self, rank: int, *chunks: tuple[float, bytes]) -> None:
        directory = self.directories.get(rank, str(self.here))
        logs = LogFiles(directory, 0, pytest.fail)
        begun = self.clock[0]
        for when, data in chunks:
            self.clock[0] = begun + when
            logs.output(rank, STDOUT, data, when)
        logs.rank_ended(rank, 0.0)
        self.clock[0] = begun

    def ask(self, job, command, kind, *, timeout_s, **fields):
        if kind == "logs":
            ranks = [rank for first, last in fields["ranks"] for rank in range(first, last + 1)]
            return [self.list(rank) for rank in ranks]
        if fields["rank"] in self.silent:
            raise ConfigError("it did not answer in time")
        rank = fields["rank"] if fields["stream"] is not None else None
        request = m.ReadLog(
            serial=1,
            attempt=0,
            rank=rank,
            stream=fields["stream"] or 0,
            offset=fields["offset"],
            size=fields["size"],
        )
        self.parts.append(request)
        part = answer(request, (self.directories[fields["rank"]], TRAIN))
        return {"data": b64encode(part.data).decode()}

    def list(self, rank: int):
        request = m.ListLogs(serial=1, attempt=0, ranks=(rank,))
        listed = plain(answer(request, (self.directories[rank], TRAIN)))
        problem = "it is not connected" if rank in self.silent else None
        files = [] if problem else listed["files"]
        return {
            **listed,
            "node": rank,
            "host": f"n{rank}",
            "ranks": [rank],
            "files": files,
            "problem": problem,
        }

    def lines(self, ranks=None, **options) -> list[bytes]:
        return [
            each.text for each in read_lines(self.job, 0, ranks, find=self.logs.find, **options)
        ]

    def last(self, count, ranks=None) -> list[bytes]:
        return [each.text for each in last_lines(self.job, 0, ranks, count, find=self.logs.find)]


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    clock = [1_000.0]
    monkeypatch.setattr(writer.time, "time", lambda: clock[0])
    launcher = Launcher(tmp_path, clock)
    monkeypatch.setattr(remote_logs, "ask_running", launcher.ask)
    monkeypatch.setattr(
        remote_logs,
        "other_logs",
        lambda job, attempt, ranks: [
            OtherLogs(host=f"n{rank}", ranks=(rank,), directory="", is_lost=False)
            for rank in (1, 2)
            if ranks is None or rank in ranks
        ],
    )
    return launcher


def test_lines_of_all_hosts_are_merged_by_time(launcher):
    launcher.write(0, (0, b"a\n"), (6, b"d\n"))
    launcher.write(1, (2, b"b\n"), (8, b"e\n"))
    launcher.write(2, (4, b"c\n"))
    assert launcher.lines() == [b"a", b"b", b"c", b"d", b"e"]
    assert launcher.lines({2}) == [b"c"]
    assert launcher.lines(since=1_005.5) == [b"d", b"e"]
    assert launcher.last(2) == [b"d", b"e"]
    assert launcher.unread == []


def test_of_a_huge_log_only_the_end_is_read(launcher):
    launcher.write(1, *((each * 2, b"old line %d\n" % each) for each in range(3000)))
    path = os.path.join(launcher.directories[1], "attempt-0", "rank-1.log")
    with open(path, "r+b") as file:
        file.truncate(10 << 30)  # sparse
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast\n")
    assert launcher.last(1, {1}) == [b"last"]
    assert sum(part.size for part in launcher.parts) < 200_000


def test_lines_of_a_time_need_only_the_end_of_the_index(launcher):
    launcher.write(1, *((each * 2, b"line %d\n" % each) for each in range(30_000)))
    assert launcher.lines({1}, since=1_000.0 + 2 * 29_995) == [
        b"line %d" % each for each in range(29_995, 30_000)
    ]
    assert sum(part.size for part in launcher.parts) < 300_000


def test_many_small_parts_are_few_requests(launcher):
    launcher.write(1, *((each * 2, b"line %d\n" % each) for each in range(5000)))
    assert len(launcher.lines({1})) == 5000
    assert len(launcher.parts) < 10


def test_a_node_that_does_not_answer_is_named_and_the_others_are_shown(launcher):
    launcher.write(1, (0, b"one\n"))
    launcher.write(2, (0, b"two\n"))
    launcher.silent.add(2)
    assert launcher.lines() == [b"one"]
    assert [(each.logs.host, each.logs.ranks, each.why) for each in launcher.unread] == [
        ("n2", (2,), "it is not connected")
    ]
    assert launcher.lines() == [b"one"]
    assert len(launcher.unread) == 1, "named once"


def test_a_node_that_stops_to_answer_ends_its_part(launcher):
    launcher.write(1, (0, b"one\n"))
    launcher.write(2, (0, b"two\n"))
    launcher.logs.find(0, None)
    launcher.silent.add(2)
    assert launcher.lines() == [b"one"]
    assert [(each.logs.host, each.why) for each in launcher.unread] == [
        ("n2", "it did not answer in time")
    ]


def test_what_is_written_later_is_followed(launcher, monkeypatch):
    launcher.write(1, (0, b"old\nhalf"))
    monkeypatch.setattr(remote_logs, "_LIST_S", 0.0)
    follower = LogFollower(launcher.job, None, attempt=0, find=launcher.logs.find)
    launcher.write(1, (2, b" line\nnew\n"))
    assert [line.text for line in follower.lines()] == [b"half line", b"new"]
    launcher.write(2, (3, b"first\n"))
    assert [line.text for line in follower.lines()] == [b"first"]


@pytest.mark.parametrize("data", [None, "no base64!", "é", 7])
def test_odd_parts_are_a_problem_of_that_node(launcher, monkeypatch, data):
    launcher.write(1, (0, b"one\n"))

    def ask(*args, **fields):
        result = launcher.ask(*args, **fields)
        return {"data": data} if isinstance(result, dict) else result

    monkeypatch.setattr(remote_logs, "ask_running", ask)
    assert launcher.lines({1}) == []
    assert [each.logs.host for each in launcher.unread] == ["n1"]
