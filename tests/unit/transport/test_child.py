from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from distlaunch.transport.child_process import Child, KillSwitch, reap
from distlaunch.transport.connect_errors import ConnectStepError
from distlaunch.transport.ssh.stream import ProxyCommandStream

BOUND_S = 30.0
FAMILY = "echo $$; sleep 3600 & echo $!; wait"
"""Prints its own pid and that of its child; neither takes notice of its stream's end."""


def until(condition) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def group(pgid: int) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == pgid and fields[0] not in "ZX":
            found.append(int(name))
    return found


def lines(stream, count: int) -> list[str]:
    stream.settimeout(BOUND_S)
    data = b""
    while data.count(b"\n") < count:
        more = stream.recv(4096)
        assert more, data
        data += more
    return data.decode().split("\n")[:count]


@pytest.fixture
def kill_switch():
    made = KillSwitch()
    yield made
    made.close()


@pytest.fixture
def start(kill_switch):
    started = []

    def start(*argv, environ=None):
        child = Child(
            argv, environ=os.environ if environ is None else environ, kill_switch=kill_switch
        )
        started.append(child)
        return child

    yield start
    for child in started:
        child.close()
        child.stream.close()
    until(lambda: (reap(), all(child.returncode() is not None for child in started))[1])


def test_its_arguments_stream_and_words_are_its_own(start):
    program = (
        "import sys; print(sys.argv[1:], sys.stdin.readline(), file=sys.stderr); print('done')"
    )
    child = start(sys.executable, "-c", program, "", "a b", "$HOME", "'", "\n")
    child.stream.sendall(b"said\n")
    assert lines(child.stream, 1) == ["done"]
    assert child.returncode(BOUND_S) == 0
    assert child.read_stderr().decode() == "['', 'a b', '$HOME', \"'\", '\\n'] said\n\n"


def test_it_has_no_descriptor_but_the_three(start):
    child = start("ls", "/proc/self/fd")
    assert lines(child.stream, 4)[:3] == ["0", "1", "2"]


def test_closing_it_ends_its_whole_group(start):
    child = start("/bin/sh", "-c", FAMILY)
    pids = [int(line) for line in lines(child.stream, 2)]
    child.close()
    child.close()
    until(lambda: not any(map(is_alive, pids)) and not group(pids[0]))


def test_closing_it_ends_what_it_has_left_behind(start):
    child = start("/bin/sh", "-c", "echo $$; sleep 3600 & echo $!")
    pids = [int(line) for line in lines(child.stream, 2)]
    assert child.returncode(BOUND_S) == 0
    assert is_alive(pids[1])
    child.close()
    until(lambda: not group(pids[0]))


def test_closing_the_kill_switch_ends_all_and_lets_nobody_start(start, kill_switch):
    pids = [
        [int(line) for line in lines(start("/bin/sh", "-c", FAMILY).stream, 2)] for _ in range(3)
    ]
    kill_switch.close()
    until(lambda: not any(group(leader) for leader, _ in pids))
    with pytest.raises(OSError, match="job"):
        start("true")


def test_the_kill_switch_costs_no_descriptor_when_nobody_hangs_on_it(kill_switch):
    before = len(os.listdir("/proc/self/fd"))
    child = Child(["true"], environ=os.environ, kill_switch=kill_switch)
    child.returncode(BOUND_S)
    child.close()
    child.stream.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("handling", "ended_by"),
    [("", signal.SIGTERM), ("trap '' TERM;", signal.SIGKILL)],
    ids=["asked", "killed"],
)
def test_one_without_a_kill_switch_that_outlives_its_stream_is_stopped(handling, ended_by):
    child = Child(
        ["/bin/sh", "-c", f"{handling} echo here; while :; do read x; done"],
        environ=os.environ,
        kill_switch=None,
    )
    try:
        assert lines(child.stream, 1) == ["here"]
        child.stream.shutdown(socket.SHUT_WR)
        assert child.returncode(0.2) is None
    finally:
        child.stop(0.2)
        code = child.returncode(BOUND_S)
        child.close()
        child.stream.close()
    assert code == -ended_by


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_it_ends_with_whoever_started_it_however_that_ends(tmp_path, number):
    """From a thread that has ended long before, as from one that opens connections."""
    program = f"""
        import os, signal, threading
        from distlaunch.transport.child_process import Child, KillSwitch
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        switch, made = KillSwitch(), []
        start = lambda: made.append(Child(["/bin/sh", "-c", {FAMILY!r}], environ=os.environ, kill_switch=switch))
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        data = b""
        while data.count(b"\\n") < 2:
            data += made[0].stream.recv(4096)
        print(data.decode(), end="", flush=True)
        signal.pause()
    """
    launcher = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    with launcher:
        pids = [int(launcher.stdout.readline()) for _ in range(2)]
        assert all(map(is_alive, pids))
        launcher.send_signal(number)
    until(lambda: not any(map(is_alive, pids)) and not group(pids[0]))


def test_a_program_that_cannot_be_run_is_an_os_error(start, tmp_path):
    with pytest.raises(FileNotFoundError):
        start("no-such-program")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(PermissionError):
        start(str(file))


def test_a_proxy_command_of_another_user_does_not_hold_up_its_wire(kill_switch, monkeypatch):
    """Only root may kill the program of ``sudo``: it must exit when its stream ends."""
    wire = ProxyCommandStream("sleep 3600", os.environ, kill_switch)

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr(os, "killpg", refuse)
        wire.close()
        wire.close()
        wire.free()
    kill_switch.close()  # here it is ours, so that the guard may
    until(lambda: (reap(), wire._child.returncode() is not None)[1])


def test_a_proxy_command_that_is_no_program_is_reported(kill_switch):
    with pytest.raises(ConnectStepError, match=r"ProxyCommand .* No such file"):
        ProxyCommandStream("x", {"SHELL": "/no/shell"}, kill_switch)
