"""Every kind of connection, with a scripted program at the other end."""

from __future__ import annotations

import hashlib
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from distlaunch.transport.child_process import open_local_agent, reap
from distlaunch.transport.connection import Target, describe_end
from distlaunch.transport.ssh.config import SshOptions
from distlaunch.transport.ssh.host_keys import HostKeyCheck
from distlaunch.transport.ssh.nodes import SshConnector
from distlaunch.transport.ssh.openssh import SshCommandConnector
from tests.facts import mentions
from tests.sshd import Sshd, children, stand_in

BOUND_S = 60.0
MANY = 20 << 20


class End:
    """The main loop's end of a connection. It waits by poll on ``fileno``."""

    def __init__(self, link) -> None:
        self.link = link
        self.poll = select.poll()
        self.poll.register(link.fileno(), select.POLLIN)
        self.rest = b""

    def read(self, size: int) -> bytes:
        deadline = time.monotonic() + BOUND_S
        parts, have = [self.rest], len(self.rest)
        while have < size:
            assert self.poll.poll((deadline - time.monotonic()) * 1000), (
                f"{have} of {size} bytes came"
            )
            data = self.link.receive()
            assert data is not None, f"ended after {have} bytes: {describe_end(self.link.end())}"
            parts.append(data)
            have += len(data)
        whole = b"".join(parts)
        self.rest = whole[size:]
        return whole[:size]

    def line(self) -> str:
        line = b""
        while not line.endswith(b"\n"):
            line += self.read(1)
        return line.decode().rstrip("\n")

    def until_end(self) -> bytes:
        deadline = time.monotonic() + BOUND_S
        data = self.rest
        while True:
            assert self.poll.poll((deadline - time.monotonic()) * 1000), "no end came"
            more = self.link.receive()
            if more is None:
                return data
            data += more

    def say(self, text: str) -> None:
        self.link.send(text.encode() + b"\n")


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def jump(tmp_path_factory):
    server = Sshd(tmp_path_factory.mktemp("jump"))
    yield server
    server.close()


KINDS = ("beside", "ssh", "ssh through a jump host", "ssh through a ProxyCommand", "openssh")


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def opened(kind, sshd, jump, request):
    """Open connections of one kind. At the end all are closed, and nothing of them is left."""
    before = set(children(os.getpid()))  # the servers, and a Slurm that other tests keep up
    links = []
    openers = {}

    def open_connection():
        if not openers:
            openers["open"] = make_opener(kind, sshd, jump)
        link = openers["open"](Target(host="node"), BOUND_S)
        links.append(link)
        return link

    yield open_connection
    for link in links:
        link.close()
    until(lambda: nothing_left(before))


def nothing_left(before: set[int]) -> bool:
    reap()
    return before.issuperset(children(os.getpid()))


def buried() -> bool:
    return any(thread.name == "dl-cleanup" for thread in threading.enumerate())


def until(condition, within_s: float = BOUND_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def make_opener(kind: str, sshd: Sshd, jump: Sshd):
    code = stand_in()
    environ = dict(os.environ)
    if kind == "beside":
        return lambda target, within_s: open_local_agent(
            target, within_s, code=code, environ=environ
        )
    extra = []
    if "jump" in kind:
        path = sshd.config("ProxyJump jump")
        jump_config = jump.config(host="jump")
        path.write_text(path.read_text() + jump_config.read_text())
    else:
        if "ProxyCommand" in kind:
            relay = Path(__file__).parents[1] / "programs" / "relay.py"
            extra = [f"ProxyCommand {sys.executable} {relay} %h %p"]
        path = sshd.config(*extra)
    ssh_options = SshOptions(config=str(path))
    if kind == "openssh":
        return SshCommandConnector(
            "ssh",
            options=ssh_options,
            host_keys="strict",
            code=code,
            pythons=[sys.executable],
            environ=environ,
        ).open
    return SshConnector(
        options=ssh_options,
        check=HostKeyCheck("strict"),
        code=code,
        pythons=[sys.executable],
        environ=environ,
    ).open


@pytest.fixture
def end(opened):
    return End(opened())


def test_bytes_go_both_ways(end):
    end.link.send(b"echo 5\nabc\0\xff")
    assert end.read(5) == b"abc\0\xff"


def test_nothing_has_come_before_something_was_asked_for(end):
    assert end.link.receive() == b""
    assert not end.poll.poll(50)


def test_bytes_after_the_greeting_are_not_lost(end):
    end.say("pid")
    assert int(end.line()) > 1


def test_the_agent_runs_isolated_in_utf_8_and_gets_only_the_token(end):
    end.say("argv")
    argv, isolated, no_site, utf8, code_fd = eval(end.line())
    assert argv[0] == "-c"
    assert len(argv) == 3
    assert len(argv[2]) == 32
    assert (isolated, no_site, utf8) == (1, 1, 1)
    assert code_fd > 2


def test_many_bytes_come_whole(end):
    end.say(f"send {MANY}")
    block = bytes(range(256)) * 256
    assert (
        hashlib.sha256(end.read(MANY)).digest()
        == hashlib.sha256(block * (MANY // len(block))).digest()
    )


def test_many_bytes_go_whole(end):
    data = os.urandom(1 << 20) * (MANY >> 20)
    end.say(f"take {MANY}")
    end.link.send(data)
    assert end.line() == hashlib.sha256(data).hexdigest()


def test_many_bytes_go_and_come_at_once(end):
    data = os.urandom(1 << 20) * (MANY >> 20)

    def send() -> None:
        for start in range(0, MANY, 1 << 16):
            end.link.send(b"echo 65536\n" + data[start : start + (1 << 16)])

    sender = threading.Thread(target=send)
    sender.start()
    assert end.read(MANY) == data
    sender.join()


def test_unread_output_is_held_back_at_the_other_end(end):
    end.say(f"send {MANY * 4}")
    end.say("pid")
    until(lambda: end.poll.poll(1000))
    before = resident()
    time.sleep(0.5)
    assert resident() - before < MANY
    end.read(MANY * 4)
    assert int(end.line())


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_stderr_is_kept_aside_however_much_of_it_there_is(end):
    end.say(f"flood {MANY}")
    assert end.line() == "done"
    end.say("words last words")
    assert end.line() == "done"
    until(lambda: end.link.receive() == b"" and end.link.stderr_tail().endswith(b"last words"))
    assert len(end.link.stderr_tail()) < 1 << 17


def test_the_end_of_the_agent_is_the_end_of_the_stream_for_ever(end):
    end.say("end 7")
    assert end.until_end() == b""
    assert end.link.receive() is None
    assert end.link.receive() is None
    assert end.poll.poll(0)
    assert mentions(describe_end(end.link.end()), "status 7")


def test_the_last_line_of_stderr_has_the_reason_of_the_end(end):
    end.link.send(b"words first\x1b[2J\nend 3\n")
    assert end.line() == "done"
    end.until_end()
    assert mentions(describe_end(end.link.end()), r"status 3: first\x1b[2J")
    end.link.close()
    assert mentions(describe_end(end.link.end()), r"status 3: first\x1b[2J")


def test_output_before_the_end_comes_first(end):
    end.link.send(b"send 3000000\nend 0\n")
    assert len(end.until_end()) == 3000000


def test_a_killed_agent_is_noticed(end, kind):
    end.say("pid")
    os.kill(int(end.line()), signal.SIGKILL)
    end.until_end()
    message = {"beside": "it was killed by signal 9"}.get(kind, "it ended with status 137")
    assert describe_end(end.link.end()) == message


def test_sending_after_the_end_is_an_os_error(end):
    end.say("end 0")
    end.until_end()
    with pytest.raises(OSError):
        end.link.send(b"x" * MANY)


def test_closing_ends_the_agent(end):
    end.say("pid")
    pid = int(end.line())
    end.link.close()
    until(lambda: (reap(), not Path(f"/proc/{pid}").exists())[1])


def test_closing_twice_and_receiving_after_that_are_harmless(end):
    end.link.close()
    end.link.close()
    assert end.link.receive() is None
    assert describe_end(end.link.end())
    with pytest.raises(OSError):
        end.link.send(b"x")


def test_closing_from_another_thread_wakes_a_sender_that_nobody_reads_from(end):
    end.say("sleep 3")
    failed = threading.Event()
    sending = threading.Event()

    def send() -> None:
        try:
            while True:
                sending.set()
                end.link.send(b"x" * (8 << 20))
        except OSError:
            failed.set()

    sender = threading.Thread(target=send)
    sender.start()
    sending.wait()
    time.sleep(0.5)
    end.link.close()
    assert failed.wait(BOUND_S)
    sender.join()


def test_a_link_leaves_no_thread_no_descriptor_and_no_process(opened):
    before = set(children(os.getpid()))
    opened().close()  # what is made once stays: imports, the resolver's files
    until(lambda: nothing_left(before) and not buried())
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        opened().close()
    until(lambda: nothing_left(before) and not buried())
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_several_links_at_once_are_apart(opened):
    ends = [End(opened()) for _ in range(4)]
    for number, one in enumerate(ends):
        one.link.send(b"echo 3\nn%d\n" % number)
    assert [one.read(3) for one in ends] == [b"n%d\n" % number for number in range(4)]
