from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing.resource_tracker import ResourceTracker
from pathlib import Path

import pytest

from distlaunch.core.agent.workers import process_tree

# A parent with two children, one of which has a child; all wait for their stdin to close. It prints
# all pids.
FAMILY = textwrap.dedent("""
    import os, subprocess, sys
    child = "import subprocess, sys; p = subprocess.Popen(['cat']); print(p.pid, flush=True); p.wait()"
    first = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True)
    second = subprocess.Popen(["cat"])
    print(first.pid, int(first.stdout.readline()), second.pid, flush=True)
    first.wait(), second.wait()
""")


class Family:
    """Real processes: ``parent`` > ``child`` > ``grandchild``, and ``sibling`` of the child."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", FAMILY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.parent = self.process.pid
        self.child, self.grandchild, self.sibling = map(int, self.process.stdout.readline().split())

    @property
    def all(self) -> list[int]:
        return [self.parent, self.child, self.grandchild, self.sibling]

    def states(self) -> str:
        facts = [process_tree.stat_of(pid) for pid in self.all]
        return "".join(fact[0] if fact else "-" for fact in facts)

    def end(self) -> None:
        for pid in self.all:
            process_tree.send(pid, signal.SIGKILL)
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture
def family():
    started = Family()
    yield started
    started.end()


def soon(condition) -> None:
    """Wait until the kernel has done it."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def stopped(family: Family) -> None:
    soon(lambda: family.states() == "TTTT")


def ended(pids: list[int]) -> None:
    """Wait until processes are gone or zombies."""
    soon(
        lambda: all(
            (facts := process_tree.stat_of(pid)) is None or facts[0] in "ZX" for pid in pids
        )
    )


def test_children_are_direct_children_only(family):
    assert set(process_tree.children_of(family.parent)) == {family.child, family.sibling}
    assert process_tree.children_of(family.grandchild) == []
    assert family.parent in process_tree.children_of(os.getpid())


def test_children_of_every_thread_are_found():
    code = (
        "import subprocess, threading\n"
        "ps = []\n"
        "t = threading.Thread(target=lambda: (ps.append(subprocess.Popen(['cat'])), print(ps[0].pid, flush=True), ps[0].wait()))\n"
        "t.start(); t.join()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    child = int(process.stdout.readline())
    found = process_tree.children_of(process.pid)
    process.stdin.close()
    process.wait()
    process.stdout.close()
    assert found == [child]


def test_children_are_found_without_the_kernels_list(family):
    by_parent = process_tree._children_by_parent()
    assert set(by_parent[family.parent]) == {family.child, family.sibling}
    assert family.grandchild not in by_parent


def test_descendants_come_after_their_parents(family):
    found = process_tree.descendants_of(family.parent)
    assert sorted(found) == sorted([family.child, family.grandchild, family.sibling])
    assert found.index(family.child) < found.index(family.grandchild)


def test_stat_returns_state_parent_and_session(family):
    state, parent, session, started, group = process_tree.stat_of(family.child)
    assert (parent, session, group) == (family.parent, os.getsid(0), os.getpgrp())
    assert state in "RS"
    assert started >= process_tree.stat_of(family.parent)[3]


def test_stat_reads_names_with_brackets_and_spaces(tmp_path):
    program = tmp_path / "a ) S 1 (b"
    program.symlink_to("/bin/cat")
    process = subprocess.Popen([program], stdin=subprocess.PIPE)
    facts = process_tree.stat_of(process.pid)
    process.stdin.close()
    process.wait()
    assert facts[1:3] == (os.getpid(), os.getsid(0))


def test_a_process_that_is_gone_has_no_facts():
    process = subprocess.Popen(["true"])
    process.wait()
    assert process_tree.stat_of(process.pid) is None
    assert process_tree.children_of(process.pid) == []
    assert process_tree.descendants_of(process.pid) == []
    assert process_tree.catches(process.pid, signal.SIGUSR1) is False
    assert process_tree.cookie_rank(process.pid, "c") is None
    assert process_tree.send(process.pid, signal.SIGTERM) is False


def test_send_signals_one_process_only(family):
    assert process_tree.send(family.sibling, signal.SIGKILL)
    ended([family.sibling])
    assert "Z" not in family.states()[:3]


def test_send_refuses_a_process_that_is_not_below_the_ancestor(family):
    assert (
        process_tree.send(family.child, signal.SIGKILL, parent_or_ancestor=family.sibling) is False
    )
    assert (
        process_tree.send(family.parent, signal.SIGKILL, parent_or_ancestor=family.parent) is False
    ), "itself is not below"
    assert process_tree.send(os.getpid(), signal.SIGKILL, parent_or_ancestor=family.parent) is False
    assert set(family.states()) <= {"R", "S", "D"}


@pytest.mark.parametrize("ancestor", ["child", "parent"])
def test_send_accepts_a_parent_or_an_ancestor(family, ancestor):
    assert process_tree.send(
        family.grandchild, signal.SIGKILL, parent_or_ancestor=getattr(family, ancestor)
    )
    ended([family.grandchild])


def test_a_tree_is_stopped_and_continued_as_a_whole(family):
    process_tree.signal_tree(family.parent, signal.SIGSTOP, include_root=True)
    stopped(family)
    process_tree.signal_tree(family.parent, signal.SIGCONT, include_root=True)
    soon(lambda: "T" not in family.states())


def test_the_root_can_be_left_out(family):
    process_tree.signal_tree(family.parent, signal.SIGKILL, include_root=False)
    ended([family.child, family.grandchild, family.sibling])
    assert family.process.wait() == 0, "it ended by itself, its children being gone"


def test_a_stopped_tree_can_be_killed(family):
    process_tree.signal_tree(family.parent, signal.SIGSTOP, include_root=True)
    stopped(family)
    process_tree.kill_each_tree([family.parent])
    assert family.process.wait() == -signal.SIGKILL
    ended(family.all)


def test_a_tree_that_goes_on_forking_is_killed():
    reader, writer = os.pipe()
    process = subprocess.Popen(
        ["sh", "-c", "while :; do cat <&3 & echo $!; i=$((i+1)); [ $i -gt 40 ] && wait; done 3<&0"],
        stdin=reader,
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(reader)
    children = [int(process.stdout.readline()) for _ in range(5)]
    process_tree.kill_each_tree([process.pid])
    assert process.wait() == -signal.SIGKILL
    children += map(int, process.stdout.read().split())  # ends when the last of them has closed it
    process.stdout.close()
    os.close(writer)
    ended(children)


def test_a_cleaner_is_recognised_immediately():
    for _ in range(20):  # most have no command line yet when their parent goes on
        tracker = ResourceTracker()
        tracker.ensure_running()
        assert process_tree.is_cleaner(tracker._pid)
        tracker._stop()


# Tells the kernel, by prctl(PR_SET_MM, PR_SET_MM_MAP), that its arguments end where they begin:
# /proc/PID/cmdline is empty from then on. The numbers of fields are those of proc(5), less one.
NAMELESS = textwrap.dedent("""
    import ctypes, signal
    with open("/proc/self/stat") as file:
        fields = ["", "", *file.read().rpartition(")")[2].split()]
    places = (25, 26, 27, 44, 45, 46, 47, 49, 50)
    code, end_code, stack, data, end_data, brk, arg, env, end_env = (int(fields[place]) for place in places)
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    no_file = 0xFFFFFFFF << 32
    values = (code, end_code, data, end_data, brk, libc.sbrk(0), stack, arg, arg, env, end_env, 0, no_file)
    told = (ctypes.c_uint64 * 13)(*values)
    print(libc.prctl(35, 14, ctypes.byref(told), ctypes.sizeof(told), 0), flush=True)
    signal.pause()
""")


def test_a_process_without_a_command_line_is_waited_for_once(monkeypatch):
    pauses = []
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", NAMELESS], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "0\n"
    real = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: pauses.append(seconds) or real(seconds))
    process_tree.is_cleaner(process.pid)
    first = len(pauses)
    for _ in range(5):
        process_tree.is_cleaner(process.pid)
    assert Path(f"/proc/{process.pid}/cmdline").read_bytes() == b""
    process.kill()
    process.wait()
    process.stdout.close()
    assert first > 0
    assert len(pauses) == first


def test_handlers_of_signals_are_detected():
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGUSR1, lambda *_: None)\n"
        "signal.signal(signal.SIGUSR2, signal.SIG_IGN)\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    caught = [
        process_tree.catches(process.pid, signum)
        for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
    ]
    process.stdin.close()
    process.stdout.close()
    process.wait()
    assert caught == [True, False, False]


@pytest.mark.parametrize(
    ("env", "rank"),
    [
        ({"DISTLAUNCH_COOKIE": "c00c1e", "RANK": "12"}, 12),
        ({"DISTLAUNCH_COOKIE": "c00c1e"}, None),
        ({"DISTLAUNCH_COOKIE": "c00c1e", "RANK": "x"}, None),
        ({"DISTLAUNCH_COOKIE": "c00c1e00", "RANK": "1"}, None),
        ({"MY_DISTLAUNCH_COOKIE": "c00c1e", "RANK": "1"}, None),
        ({"RANK": "1"}, None),
    ],
)
def test_a_cookie_identifies_the_worker_of_a_process(env, rank):
    process = subprocess.Popen(
        ["cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PATH": os.defpath, **env},
        bufsize=0,
    )
    process.stdin.write(b"up\n")  # exec may not have set up the environment yet when Popen returns
    process.stdout.readline()
    found = process_tree.cookie_rank(process.pid, "c00c1e")
    process.stdin.close()
    process.stdout.close()
    process.wait()
    assert found == rank
