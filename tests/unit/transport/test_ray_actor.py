from __future__ import annotations

import os
import resource

import pytest

from distlaunch.transport.ray.actor import AgentActor
from tests.facts import mentions

GREETING = b"hello\n"
AGENT = "import os, sys; sys.stdin.buffer.read(4); print('noise\\nhello', flush=True); "


@pytest.fixture
def start():
    seats = []

    def started(script, mask=()):
        seats.append(AgentActor())
        return seats[-1], seats[-1].start(["-c", script], b"code", GREETING, list(mask), 20.0)

    yield started
    for seat in seats:
        seat.stop(20.0)
        for stream in (seat._agent.stdin, seat._agent.stdout, seat._agent.stderr):
            stream.close()


def all_of(seat):
    found = b""
    while (data := seat.read(100, 20.0)) is not None:
        found += data
    return found


def test_bytes_go_both_ways_after_the_greeting(start):
    seat, problem = start(AGENT + "print(sys.stdin.read(3), end='')")
    assert problem is None
    seat.write(b"abc")
    assert all_of(seat) == b"abc"
    assert seat.end() == (0, "")


def test_an_agent_that_fails_reports_the_reason(start):
    _, problem = start("import sys; sys.exit('no room')")
    assert mentions(problem, "agent failed", "status 1", "no room")


@pytest.mark.parametrize(
    ("there", "reported"),
    [((), ["1,0", "-"]), (("HIP_VISIBLE_DEVICES",), ["-", "1,0"])],
)
def test_the_mask_of_all_bundles_stands_where_ray_has_set_its_own(
    start, monkeypatch, there, reported
):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name in there:
        monkeypatch.setenv(name, "1")
    words = "[os.environ.get(f'{name}_VISIBLE_DEVICES', '-') for name in ('CUDA', 'HIP')]"
    seat, _ = start(AGENT + f"print(*{words})", ["1", "0"])
    assert all_of(seat).decode().split() == reported


def test_an_agent_that_has_ended_is_no_zombie_of_the_actor(start):
    seat, _ = start(AGENT)
    assert all_of(seat) == b""
    with pytest.raises(ChildProcessError):
        until_reaped(seat._agent.pid)


def until_reaped(pid):
    while True:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_descriptors_above_those_of_select_are_read(start):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        seat, problem = start(AGENT)
        assert problem is None
        assert all_of(seat) == b""
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
