"""A real agent as a child process, and a small coordinator at its stdin and stdout."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol.codec import Decoder, encode
from distlaunch.transport.bootstrap import agent_zip

STUB = """
import os,sys
f=os.memfd_create("x")
n=int(sys.argv[1])
while n:
    b=os.read(0,n); n-=len(b)
    os.write(f,b)
sys.path.insert(0,"/proc/self/fd/%d"%f)
from distlaunch.core.agent.main import main
main(sys.argv[2],f,silence_s=float(sys.argv[3]))
"""
PLENTY = 1 << 40
PATIENCE_S = 30.0


@pytest.fixture(scope="session")
def code() -> bytes:
    return agent_zip()


class Coordinator:
    """The other side of an agent's channel."""

    def __init__(
        self, code: bytes, env: dict[str, str], *, silence_s: float, python: str, pipes: bool
    ) -> None:
        argv = [
            python,
            "-I",
            "-S",
            "-X",
            "utf8",
            "-c",
            STUB,
            str(len(code)),
            "w0rd",
            str(silence_s),
        ]
        self.env = env
        if pipes:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                start_new_session=True,
            )
            assert self.process.stdin
            assert self.process.stdout
            self.writing, self.reading = (
                os.dup(self.process.stdin.fileno()),
                os.dup(self.process.stdout.fileno()),
            )
            self.process.stdin.close()
            self.process.stdout.close()
        else:
            ours, theirs = socket.socketpair()
            self.process = subprocess.Popen(
                argv,
                stdin=theirs,
                stdout=theirs,
                stderr=subprocess.PIPE,
                env=env,
                start_new_session=True,
            )
            theirs.close()
            self.reading = ours.detach()
            self.writing = os.dup(self.reading)
        self._decoder: Decoder[Any] = Decoder(m.FROM_REMOTE, m.REMOTE_NESTED_TYPES)
        self.received: list[Any] = []
        self.taken: dict[tuple[int, int], bytearray] = {}
        self.ended = False
        self._write(code)
        self.noise = b""
        while m.GREETING not in self.noise or not self.noise.endswith(b"\n"):
            assert select.select([self.reading], [], [], PATIENCE_S)[0], "no greeting"
            byte = os.read(self.reading, 1)
            assert byte, (self.noise, self.stderr())
            self.noise += byte
        assert self.noise.endswith(m.GREETING + b"w0rd\n")
        self.until(m.Hello)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.writing, data) :]

    def send(self, *messages: Any) -> None:
        for message in messages:
            self._write(encode(message))

    def send_raw(self, data: bytes) -> None:
        self._write(data)

    def read(self, wait_s: float) -> bool:
        """Return what comes within this time, or False if nothing came."""
        if self.ended or not select.select([self.reading], [], [], wait_s)[0]:
            return False
        try:
            data = os.read(self.reading, 1 << 18)
        except ConnectionError:
            data = b""
        if not data:
            self.ended = True
        for message in self._decoder.feed(data):
            self.received.append(message)
            if isinstance(message, m.Output):
                self.taken.setdefault((message.rank, message.stream), bytearray()).extend(
                    message.data
                )
        return True

    def until(self, kind: type | Any, count: int = 1, *, where: Any = None) -> list[Any]:
        """Read until so many messages of a kind have come. Return them."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = [
                one
                for one in self.received
                if isinstance(one, kind) and (where is None or where(one))
            ]
            if len(found) >= count:
                return found
            assert time.monotonic() < deadline, self.received[-5:]
            assert not self.ended, (self.received[-5:], self.stderr())
            self.read(1.0)

    def until_taken(self, rank: int, what: bytes, stream: int = 1) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while what not in self.taken.get((rank, stream), b""):
            assert time.monotonic() < deadline, (what, self.taken)
            assert not self.ended, (self.received[-5:], self.stderr())
            self.read(1.0)

    @property
    def size_taken(self) -> int:
        return sum(map(len, self.taken.values()))

    def give_credit_until(self, kind: type) -> None:
        """Grant credit for each output, until a message of a kind has come."""
        given = 0
        while not self.of(kind):
            self.send(m.Credit(size=self.size_taken - given))
            given = self.size_taken
            assert self.read(PATIENCE_S), self.received[-5:]

    def until_end(self) -> int:
        """Read to the end of the channel. Return the agent's exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.ended:
            assert time.monotonic() < deadline
            self.read(1.0)
        return self.process.wait(PATIENCE_S)

    def stderr(self) -> str:
        assert self.process.stderr
        if select.select([self.process.stderr], [], [], 0)[0]:
            return os.read(self.process.stderr.fileno(), 65536).decode()
        return ""

    def of(self, kind: type) -> list[Any]:
        return [one for one in self.received if isinstance(one, kind)]

    # --- what tests say

    def survey(self, **fields: Any) -> m.Surveyed:
        serial = len(self.of(m.Surveyed)) + 1
        order = {
            "serial": serial,
            "workdir": "/",
            "pythons": (sys.executable,),
            "script": "",
            "program": "",
            "run_dir": "",
            "gpus": True,
            "topology": False,
            **fields,
        }
        self.send(m.Survey(**order))
        return self.until(m.Surveyed, where=lambda one: one.serial == serial)[0]

    def prepare(self, port: int | None = None, *, attempt: int = 0, token: str = "") -> m.Prepared:
        before = len(self.of(m.Prepared))
        self.send(m.Prepare(attempt=attempt, port=port, token=token))
        return self.until(m.Prepared, before + 1)[-1]

    def start(self, *programs: Any, attempt: int = 0, credit: int = PLENTY, **fields: Any) -> None:
        workers = tuple(
            program
            if isinstance(program, m.WorkerSpec)
            else spec(rank, [sys.executable, "-c", program])
            for rank, program in enumerate(programs)
        )
        start = {
            "attempt": attempt,
            "argv": (sys.executable,),
            "env": dict(self.env),
            "cwd": "/",
            "workers": workers,
            "uses_gpus": False,
            "signal_group": False,
            "terminal": False,
            "rows": 0,
            "columns": 0,
            "stdin_rank": None,
            **fields,
        }
        if credit:
            self.send(m.Credit(size=credit))
        self.send(m.Start(**start))

    def leave(self) -> int:
        self.send(m.ExitAgent())
        return self.until_end()

    def close(self) -> None:
        for descriptor in (self.reading, self.writing):
            if descriptor >= 0:
                os.close(descriptor)
        self.reading = self.writing = -1
        self.ended = True

    def abandon(self) -> None:
        self.close()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            assert self.process.stderr
            self.process.stderr.close()


def spec(
    rank: int,
    argv: list[str] | None,
    *,
    env: dict[str, str] | None = None,
    error_file: str | None = None,
) -> m.WorkerSpec:
    return m.WorkerSpec(
        rank=rank,
        local_rank=rank,
        argv=None if argv is None else tuple(argv),
        env={"RANK": str(rank), **(env or {})},
        cpus=None,
        error_file=error_file,
    )


@pytest.fixture
def worker_spec():
    return spec


def processes_with(word: str) -> list[int]:
    """Return processes by a word in their environment or arguments."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = (
                Path(f"/proc/{name}/environ").read_bytes()
                + Path(f"/proc/{name}/cmdline").read_bytes()
            )
        except OSError:
            continue
        if word.encode() in words and int(name) != os.getpid():
            found.append(int(name))
    return found


@pytest.fixture
def make_agent(code: bytes, clean_env: dict[str, str], tmp_path: Path):
    """Start agents. Nothing of them may be left at the end."""
    mark = f"MARK-{os.urandom(8).hex()}"
    agents: list[Coordinator] = []
    node_tmp = tmp_path / "node-tmp"
    node_tmp.mkdir()

    def make(
        *, silence_s: float = 60.0, python: str = sys.executable, pipes: bool = True, **env: str
    ) -> Coordinator:
        own = {**clean_env, "MARK": mark, "TMPDIR": str(node_tmp), **env}
        agent = Coordinator(code, own, silence_s=silence_s, python=python, pipes=pipes)
        agents.append(agent)
        return agent

    make.mark = mark
    make.tmp = node_tmp
    yield make
    for agent in agents:
        agent.abandon()
    deadline = time.monotonic() + PATIENCE_S
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, [(pid, Path(f"/proc/{pid}/cmdline").read_bytes()) for pid in left]
    while (files := list(node_tmp.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not files


@pytest.fixture
def agent(make_agent) -> Coordinator:
    return make_agent()


@pytest.fixture
def count_marked(make_agent):
    return lambda: processes_with(make_agent.mark)


@pytest.fixture
def json_of():
    return lambda data: json.loads(bytes(data))
