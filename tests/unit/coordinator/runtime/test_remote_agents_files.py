"""Files of remote agents' output when nodes come and go."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.coordinator.runtime.records import LineFilter, OutputFiles
from distlaunch.core.model.run_files import TRAIN
from distlaunch.core.protocol import agent_messages as m
from tests.unit.coordinator.remote_agents import Kept, Nodes


@pytest.fixture
def filed(tmp_path):
    """Return remote agents of two nodes whose output is filed, and their console."""
    shown = Kept()
    picked = {1: LineFilter([b"attempt"], {0: b"[0] ", 1: b"[1] "})}
    for attempt in (0, 1):
        (tmp_path / f"attempt-{attempt}").mkdir()
    files = OutputFiles(str(tmp_path), shown, pytest.fail, filters=picked)
    agents = Nodes(2, kept=files)
    yield agents, shown, tmp_path
    agents.close()
    files.close()


def text(path) -> str:
    return path.read_text() if path.exists() else ""


def test_output_after_a_lost_node_is_filed_in_its_own_attempt(filed):
    agents, shown, folder = filed
    for node in (0, 1):
        agents.join(node)
        agents.give(node, node)
    agents.agents.begin_attempt(0)
    agents.give(0, 0)
    agents.give(1, 1)
    agents.say("n1", m.Output(rank=1, stream=1, data=b"of attempt 0, cut o"))
    agents.pump(lambda: text(folder / "attempt-0/rank-1.log"))
    agents.links["n1"].theirs.close()
    agents.pump(lambda: agents.of(a.Lost))
    agents.pump(lambda: (1, "ended") in shown.written)  # at once, not when another attempt begins
    agents.agents.begin_attempt(1)
    agents.give(0, 0, 1, attempt=1)
    agents.say("n0", m.Output(rank=1, stream=1, data=b"of attempt 1\n"), m.RankEnded(rank=1))
    agents.pump(lambda: shown.written[-1] == (1, "ended") and len(shown.written) == 4)
    assert text(folder / "attempt-0/rank-1.log") == "of attempt 0, cut o"
    assert text(folder / "attempt-1/rank-1.log") == "of attempt 1\n"
    assert [text(Path(TRAIN.filtered_path(str(folder), attempt, 1))) for attempt in (0, 1)] == [
        "[1] of attempt 0, cut o\n",
        "[1] of attempt 1\n",
    ]


def test_a_rank_without_an_end_ends_when_another_attempt_begins(tmp_path):
    shown = Kept()
    for attempt in (0, 1):
        (tmp_path / f"attempt-{attempt}").mkdir()
    files = OutputFiles(str(tmp_path), shown, pytest.fail)
    files.begin_attempt(0)
    files.output(3, 1, b"zero", 0.0)
    files.begin_attempt(1)
    files.output(3, 1, b"one", 0.0)
    files.rank_ended(3, 0.0)
    assert shown.written == [(3, 1, b"zero"), (3, "ended"), (3, 1, b"one"), (3, "ended")]
    assert text(tmp_path / "attempt-0/rank-3.log") == "zero"
    assert text(tmp_path / "attempt-1/rank-3.log") == "one"


@pytest.mark.parametrize("room", [True, False])
def test_more_ranks_than_files_may_be_open_all_have_their_logs(tmp_path, monkeypatch, room):
    """``room``: the limit is as low as that; else others hold the descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    (tmp_path / "attempt-0").mkdir()
    files = OutputFiles(str(tmp_path), Kept(), pytest.fail)
    files.begin_attempt(0)
    most = len(os.listdir("/proc/self/fd")) + 24
    if not room:
        monkeypatch.setattr("distlaunch.core.agent.workers.log_files._most_open", lambda: 10**6)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        for turn in range(2):
            for rank in range(200):
                files.output(rank, 1, b"%d\n" % turn, 0.0)
        taken = len(os.listdir("/proc/self/fd"))
        for rank in range(200):
            files.rank_ended(rank, 0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert {text(tmp_path / f"attempt-0/rank-{rank}.log") for rank in range(200)} == {"0\n1\n"}
    assert taken <= most
