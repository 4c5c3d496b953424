from __future__ import annotations

import signal

import pytest

from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from tests.facts import mentions

READS_ALL = "import sys, hashlib\ndata = sys.stdin.buffer.read()\nprint(len(data), hashlib.sha256(data).hexdigest())\n"
READS_A_LINE = "print('got', input())\n"


def fed(agent) -> int:
    return sum(one.size for one in agent.of(m.StdinConsumed))


def test_input_arrives_byte_for_byte_and_is_acknowledged_as_it_is_read(agent):
    import hashlib

    data = bytes(range(256)) * 16384  # 4 MiB
    agent.start(READS_ALL, stdin_rank=0, stdin_from_launcher=True)
    sent = 0
    while sent < len(data):
        piece = data[sent : sent + (256 << 10)]
        agent.send(m.StdinData(data=piece))
        sent += len(piece)
        while sent - fed(agent) > 1 << 20:
            agent.read(30)
    agent.send(m.StdinData(data=b""))
    agent.until(m.AttemptEnded)
    assert fed(agent) == len(data)
    assert agent.taken[0, 1] == f"{len(data)} {hashlib.sha256(data).hexdigest()}\n".encode()
    assert not any(one.closed for one in agent.of(m.StdinConsumed))


def test_only_the_rank_that_has_stdin_is_fed(agent):
    agent.start(READS_ALL, READS_ALL, stdin_rank=1, stdin_from_launcher=True)
    agent.send(m.StdinData(data=b"line"), m.StdinData(data=b""))
    agent.until(m.AttemptEnded)
    assert agent.taken[0, 1].startswith(b"0 ")
    assert agent.taken[1, 1].startswith(b"4 ")


def test_a_worker_that_reads_no_more_is_reported(agent):
    agent.start(READS_A_LINE, stdin_rank=0, stdin_from_launcher=True)
    agent.send(m.StdinData(data=b"hello\n"))
    agent.until(m.AttemptEnded)
    assert agent.taken[0, 1] == b"got hello\n"
    assert agent.until(m.StdinConsumed, where=lambda one: one.closed)
    count = len(agent.of(m.StdinConsumed))
    agent.send(m.StdinData(data=b"more"))
    assert agent.until(m.StdinConsumed, count + 1)[-1] == m.StdinConsumed(
        size=0, closed=True, unread=4
    )


@pytest.mark.parametrize(
    ("source", "data", "ends", "unread"),
    [
        ("", b"a\nb\n", True, 4),
        ("", b"a\nb\n", False, 4),
        ("import os\nos.read(0, 2)\n", b"a\nb\n", True, 2),
        ("", bytes(200_000), False, 200_000),
        (READS_ALL, b"a\nb\n", True, 0),
    ],
)
def test_unread_input_is_counted(agent, source, data, ends, unread):
    agent.start(source, stdin_rank=0, stdin_from_launcher=True)
    agent.send(m.StdinData(data=data), *([m.StdinData(data=b"")] if ends else []))
    agent.until(m.AttemptEnded)
    assert sum(one.unread for one in agent.of(m.StdinConsumed)) == unread


def test_a_worker_that_closes_its_stdin_and_goes_on_is_reported_at_once(agent):
    agent.start(
        "import os, time\nos.close(0)\ntime.sleep(1000)\n", stdin_rank=0, stdin_from_launcher=True
    )
    [reported] = agent.until(m.StdinConsumed)
    assert reported == m.StdinConsumed(size=0, closed=True)
    assert not agent.of(WorkerExit)
    agent.send(m.Stop(attempt=0, signum=signal.SIGTERM, grace_s=20.0))
    agent.until(m.AttemptEnded)


def test_the_next_attempt_is_fed_anew(agent):
    agent.start(READS_A_LINE, stdin_rank=0, stdin_from_launcher=True)
    agent.send(m.StdinData(data=b"one\n"))
    agent.until(m.AttemptEnded)
    agent.prepare(attempt=1)
    agent.start(READS_A_LINE, stdin_rank=0, stdin_from_launcher=True, attempt=1)
    agent.send(m.StdinData(data=b"two\n"))
    agent.until(m.AttemptEnded, 2)
    assert agent.taken[0, 1] == b"got one\ngot two\n"


def test_a_coordinator_that_floods_stdin_is_refused(agent, count_marked):
    agent.start(
        "import time; time.sleep(1000)", stdin_rank=0, stdin_from_launcher=True, orphan_grace_s=0.3
    )
    try:
        for _ in range(16):
            agent.send(m.StdinData(data=b"x" * (1 << 20)))
    except BrokenPipeError:
        pass
    assert agent.until_end() == 70
    assert mentions(agent.stderr(), "of stdin")
    assert count_marked() == []


def test_without_a_feed_stdin_is_empty(agent):
    agent.start(READS_ALL, stdin_rank=0)
    agent.until(m.AttemptEnded)
    assert agent.taken[0, 1].startswith(b"0 ")
