"""Stacks of real processes: with and without the handler, stopped, and with py-spy."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time

import pytest

from distlaunch.core.agent.workers.stacks import SIGNAL, TEXT_BYTES, StackCollector
from distlaunch.core.protocol import agent_messages as m

ARMED = """
import faulthandler, signal, sys, time
faulthandler.register(signal.SIGRTMAX - 3, file=int(sys.argv[1]), all_threads=True)
def innermost():
    print("ready", flush=True)
    time.sleep(600)
innermost()
"""
UNARMED = "print('ready', flush=True); import time; time.sleep(600)"
BUSY = """
import os, subprocess, sys
source = "import os, sys\\nprint('busy', flush=True)\\nwhile os.getppid() == int(sys.argv[1]): pass"
child = subprocess.Popen([sys.executable, "-c", source, str(os.getpid())], stdout=subprocess.PIPE)
child.stdout.readline()
print("ready", flush=True)
child.wait()
"""
TALKS = """
import os, signal, sys, time
def talk(*_):
    for _ in range(40): os.write(int(sys.argv[1]), b"x" * 8192)
    os.write(int(sys.argv[1]), b"the end")
signal.signal(signal.SIGRTMAX - 3, talk)
print("ready", flush=True)
while True: time.sleep(1)
"""
TAKES_OUR_NUMBER = """
import faulthandler, os, signal, sys, time
stacks = int(sys.argv[1])
faulthandler.register(signal.SIGRTMAX - 3, file=stacks, all_threads=True)
os.close(stacks)
if sys.argv[2]:
    os.dup2(os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT), stacks)
    os.write(stacks, b"MODEL")
print("ready", flush=True)
time.sleep(600)
"""


class Node:
    def __init__(self) -> None:
        self.answers: queue.Queue[m.Stacks] = queue.Queue()
        self.collector = StackCollector(self.answers.put)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, source: str, *args: str) -> int:
        """Start a worker, wait until it is ready, and return its pid. Ranks count up."""
        memory = os.memfd_create("stacks")
        process = subprocess.Popen(
            [sys.executable, "-c", source, str(memory), *args],
            stdout=subprocess.PIPE,
            pass_fds=(memory,),
        )
        self.collector.add(len(self.processes), memory, memory)
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process.pid

    def collect(self) -> dict[int, m.Stack]:
        question = m.CollectStacks(attempt=4, serial=7)
        self.collector.collect(
            question, {rank: process.pid for rank, process in enumerate(self.processes)}
        )
        answer = self.answers.get(timeout=20)
        assert (answer.attempt, answer.serial) == (4, 7)
        return {stack.rank: stack for stack in answer.stacks}

    def close(self) -> None:
        self.collector.close()
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def node():
    node = Node()
    yield node
    node.close()


@pytest.fixture
def no_spy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_a_worker_with_the_handler_writes_its_stacks_each_time(node, no_spy):
    pid = node.start(ARMED)
    for _ in range(2):
        stack = node.collect()[0]
        assert stack.pid == pid
        assert stack.state in ("R", "S"), "it may not have fallen asleep yet"
        assert stack.text.count("most recent call first") == 1, "only the newest dump"
        assert stack.text.index("in innermost") < stack.text.index("in <module>")


OF_A_FILE = "import sys; path = sys.argv[2]; exec(compile(open(path).read(), path, 'exec'))"


def test_the_line_of_source_at_which_a_worker_is_comes_with_its_stacks(node, no_spy, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(ARMED)
    node.start(OF_A_FILE, str(path))
    while (source := node.collect()[0].source) == 'print("ready", flush=True)':
        pass  # it has not gone on to the next line yet
    assert source == "time.sleep(600)"
    path.unlink()
    os.mkfifo(path)
    assert node.collect()[0].source == "", "it is no file any more, and would block the reader"


def test_a_worker_without_the_handler_is_not_signalled(node, no_spy):
    node.start(UNARMED)
    assert node.collect()[0].text == ""
    assert node.processes[0].poll() is None


@pytest.mark.parametrize("name", ["checkpoint.bin", ""])
def test_a_workers_own_file_at_our_descriptor_is_never_written_to(node, no_spy, tmp_path, name):
    node.start(TAKES_OUR_NUMBER, str(tmp_path / name) if name else "")
    assert node.collect()[0].text == ""
    assert node.processes[0].poll() is None
    if name:
        assert (tmp_path / name).read_bytes() == b"MODEL"


def test_many_workers_share_the_size_limit_of_an_answer(node, no_spy, monkeypatch):
    monkeypatch.setattr("distlaunch.core.agent.workers.stacks._ANSWER_BYTES", 3000)
    for _ in range(2):
        node.start(TALKS)
    texts = [stack.text for stack in node.collect().values()]
    assert [len(text) for text in texts] == [1500, 1500]
    assert all(text.endswith("the end") for text in texts)


def test_an_answer_comes_even_without_a_descriptor_for_py_spy(node, no_spy, monkeypatch):
    spy = no_spy / "py-spy"
    spy.write_text("#!/bin/sh\n")
    spy.chmod(0o755)
    node.start(UNARMED)

    def refuse(_name: str) -> int:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert node.collect()[0].text == ""


def test_a_stopped_worker_is_reported_and_the_others_answer(node, no_spy):
    stopped = node.start(ARMED)
    node.start(ARMED)
    os.kill(stopped, signal.SIGSTOP)
    os.waitid(os.P_PID, stopped, os.WSTOPPED | os.WNOWAIT)
    stacks = node.collect()
    assert (stacks[0].state, stacks[0].text) == ("T", "")
    assert "in innermost" in stacks[1].text


def test_an_exited_worker_has_neither_state_nor_text(node, no_spy):
    node.start(UNARMED)
    node.processes[0].kill()
    node.processes[0].wait()
    stack = node.collect()[0]
    assert (stack.state, stack.text) == ("", "")


def test_the_end_of_a_long_dump_is_kept(node, no_spy):
    node.start(TALKS)
    text = node.collect()[0].text
    assert len(text) <= TEXT_BYTES
    assert text.endswith("the end")


def test_py_spy_is_used_for_workers_that_do_not_answer(node, no_spy):
    spy = no_spy / "py-spy"
    spy.write_text('#!/bin/sh\necho "spied $*"\n')
    spy.chmod(0o755)
    pid = node.start(UNARMED)
    node.start(ARMED)
    stacks = node.collect()
    assert stacks[0].text == f"spied dump --full-filenames --pid {pid}\n"
    assert "in innermost" in stacks[1].text


@pytest.mark.parametrize("script", ["exit 1", "exec sleep 600", "kill -9 $$"])
def test_errors_of_py_spy_are_ignored(node, no_spy, script):
    spy = no_spy / "py-spy"
    spy.write_text(f"#!/bin/sh\nPATH={os.defpath}\necho x\n{script}\n")
    spy.chmod(0o755)
    node.start(UNARMED)
    assert node.collect()[0].text == ""


def test_closing_aborts_a_collection(node, no_spy):
    stopped = node.start(ARMED)
    os.kill(stopped, signal.SIGSTOP)
    os.waitid(os.P_PID, stopped, os.WSTOPPED | os.WNOWAIT)
    began = time.monotonic()
    node.collector.collect(m.CollectStacks(attempt=4, serial=1), {0: stopped})
    node.collector.close()
    assert node.answers.get(timeout=20).stacks[0].text == ""
    assert time.monotonic() - began < 20


def test_the_signal_is_the_one_that_the_bootstrap_arms():
    assert signal.SIGRTMAX - 3 == SIGNAL


def test_processor_time_of_a_worker_and_its_children_is_separate(node):
    node.start("print('ready', flush=True)\nwhile True: pass")
    node.start(BUSY)
    node.start(UNARMED)
    first, deadline = node.collect(), time.monotonic() + 30

    def used(name: str) -> list[bool]:
        latest = node.collect()
        return [
            getattr(latest[rank], name) >= getattr(first[rank], name) + 0.1 for rank in range(3)
        ]

    while not (used("cpu_s")[0] and used("children_cpu_s")[1]):
        assert time.monotonic() < deadline
    assert (used("cpu_s")[1:], used("children_cpu_s")[0], used("children_cpu_s")[2]) == (
        [False, False],
        False,
        False,
    )
    assert first[0].taken_s < node.collect()[0].taken_s
    assert not any(stack.holds_gpu for stack in first.values())


def test_a_request_that_comes_during_a_collection_gets_its_stacks(node, no_spy):
    pid = node.start(ARMED)
    for serial in (7, -1):
        node.collector.collect(m.CollectStacks(attempt=4, serial=serial), {0: pid})
    answers = [node.answers.get(timeout=20) for _ in range(2)]
    assert {answer.serial for answer in answers} == {7, -1}
    for answer in answers:
        assert answer.stacks[0].text.count("most recent call first") == 1
    assert "in innermost" in node.collect()[0].text, "the next request starts a new collection"


SPY = """#!/bin/sh
case "$*" in *--native*) ;; *) exit 1;; esac
while [ ! -e go ]; do sleep 0.02; done
echo "Thread 1 (idle): \\"MainThread\\"
    clock_nanosleep (libc.so.6)"
"""


def test_native_frames_come_by_py_spy_and_hold_up_no_other_request(node, no_spy, monkeypatch):
    monkeypatch.chdir(no_spy)
    monkeypatch.setenv("PATH", f"{no_spy}:/bin:/usr/bin")
    (no_spy / "py-spy").write_text(SPY)
    (no_spy / "py-spy").chmod(0o755)
    pid = node.start(ARMED)
    wanted = m.CollectStacks(attempt=4, serial=-1, for_user=True, native=True)
    node.collector.collect(wanted, {0: pid})
    for _ in range(2):  # the first may share the collection, the second has one of its own
        other = node.collect()[0]
        assert (other.native, other.text != "") == ("", True)
    (no_spy / "go").touch()
    answer = node.answers.get(timeout=20)
    assert answer.serial == -1
    assert "clock_nanosleep" in answer.stacks[0].native
    assert "in innermost" in answer.stacks[0].text
