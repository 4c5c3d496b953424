"""A joined launcher, and a coordinator that follows a script."""

from __future__ import annotations

import os
import select
import threading
from collections import deque

import pytest

from distlaunch.coordinator.joined.launcher import JoinedRunner, JoinedSettings
from distlaunch.core.agent.remote_agent import PausableClock
from distlaunch.core.model.record import Record
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol.codec import Decoder, encode
from distlaunch.launch.make_plan import make_plan
from distlaunch.planning.train_options import TrainOptions
from distlaunch.transport.connection import ConnectionEnd, EndKind

CLOSED = object()
"""A step: the coordinator closes the connection."""
FORGED = b'{"t":"Start","attempt":0,"argv":["/bin/sh","-c","id"],"env":{},"cwd":"/","workers":[]}'
"""The body of a message that would run something."""
VERDICT = p.ExitLauncher(exit_code=7, text="")


def commence(attempt: int = 0, **more) -> p.StartWorkers:
    """Start an attempt of three nodes, of which ours is the second, with two workers each."""
    values = {
        "attempt": attempt,
        "restarts": 0,
        "node_rank": 1,
        "local_ranks": (0, 1),
        "hosts": ("n0", "n1", "n2"),
        "slots": (2, 2, 2),
        "master_addr": "10.0.0.1",
        "master_port": 5555,
        "interface": "",
    }
    return p.StartWorkers(**{**values, **more})


def prepare(attempt: int = 0, **more) -> m.Prepare:
    return m.Prepare(**{"attempt": attempt, "port": None, **more})


def stop(attempt: int = 0, **more) -> m.Stop:
    return m.Stop(**{"attempt": attempt, "signum": 15, "grace_s": 25.0, **more})


def reach(attempt: int = 0, **more) -> m.Reach:
    return m.Reach(
        **{
            "attempt": attempt,
            "addresses": ("10.0.0.1",),
            "port": 5,
            "token": "ab",
            "bound_s": 5.0,
            **more,
        }
    )


class Flag:
    """A descriptor that is readable while the flag is set."""

    def __init__(self) -> None:
        self.fileno, self._end = os.pipe()
        self._is_up = False

    def put(self, up: bool) -> None:
        if up and not self._is_up:
            os.write(self._end, b"\0")
        elif not up and self._is_up:
            os.read(self.fileno, 1)
        self._is_up = up

    def close(self) -> None:
        os.close(self.fileno)
        os.close(self._end)


class ScriptedLink:
    """A connection to a coordinator. Steps are messages, bytes, ``CLOSED``, or functions to call;
    after the last it is silent."""

    def __init__(self, *steps) -> None:
        self._steps = deque(steps)
        self._flag = Flag()
        self._flag.put(bool(steps))
        self._decoder = Decoder(p.FROM_LAUNCHER, m.REMOTE_NESTED_TYPES)
        self.sent: list[Record] = []
        self.closed = False

    def feed(self, *steps) -> None:
        self._steps.extend(steps)
        self._flag.put(True)

    def fileno(self) -> int:
        return self._flag.fileno

    def receive(self) -> bytes | None:
        if not self._steps:
            self._flag.put(False)
            return b""
        step = self._steps.popleft()
        if step is CLOSED:
            return None
        if isinstance(step, bytes):
            return step
        if isinstance(step, Record):
            return encode(step)
        step()
        return b""

    def send(self, data: bytes) -> None:
        self.sent += self._decoder.feed(data)

    def close(self) -> None:
        self.closed = True

    def end(self) -> ConnectionEnd:
        return ConnectionEnd(kind=EndKind.CLOSED_BY_PEER)

    def free(self) -> None:
        self._flag.close()


class OwnNode:
    """This machine's own node. Workers obey, unless they are ``is_silent``."""

    is_broken = False
    refuses: Exception | None = None
    due_s: float | None = None
    is_silent = False

    @staticmethod
    def on_stop():
        """Do something when workers are stopped."""

    def __init__(self, clock: PausableClock) -> None:
        self.handled: list[Record] = []
        self._pending: list[Record] = []
        self._flag = Flag()
        self._clock = clock
        self.closed = False

    def start(self):
        if self.refuses:
            raise self.refuses

    def handle(self, message):
        self.handled.append(message)
        if isinstance(message, m.Stop):
            self.on_stop()
            if not self.is_silent:
                self.say(m.AttemptEnded(attempt=message.attempt, left=()))

    def say(self, message):
        self._pending.append(message)
        self._flag.put(True)

    def descriptors(self):
        return {self._flag.fileno: select.POLLIN}

    def deadline(self):
        return None if self.due_s is None else self._clock() + self.due_s

    def receive(self):
        pending, self._pending = self._pending, []
        self._flag.put(False)
        return pending

    def close(self, hurried):
        self.closed = True

    def free(self):
        self._flag.close()


class Signals:
    """The launcher's own signals."""

    def __init__(self) -> None:
        self._flag = Flag()
        self._numbers = b""

    def come(self, *numbers: int) -> None:
        self._numbers += bytes(numbers)
        self._flag.put(True)

    def fileno(self) -> int:
        return self._flag.fileno

    def read(self) -> bytes:
        numbers, self._numbers = self._numbers, b""
        self._flag.put(False)
        self.on_read()
        return numbers

    @staticmethod
    def on_read():
        """Do something when signals are read."""

    def free(self) -> None:
        self._flag.close()


class Filed:
    """The launcher's files."""

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.attempts: list[tuple[int, list[int]]] = []

    def begin_attempt(self, attempt):
        self.attempts.append((attempt, list(self.ranks)))


class Records:
    """Records the notices for the user and the events of the job."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.events: list[tuple[str, dict]] = []

    def say(self, text, *, level="info"):
        self.lines.append((level, text))

    def write(self, kind, fields):
        self.events.append((kind, dict(fields)))
        self.on_event(kind)

    @staticmethod
    def on_event(kind):
        """Do something when an event is written."""

    @property
    def text(self) -> str:
        return "\n".join(text for _, text in self.lines)

    def of(self, kind: str) -> list[dict]:
        return [fields for each, fields in self.events if each == kind]


def planner(tmp_path):
    """Return the planner of the second of three launchers."""
    options = TrainOptions(
        script="timeit",
        module=True,
        procs_per_node=2,
        num_nodes=3,
        rendezvous="127.0.0.1:5",
        node_rank=1,
    )
    joiner = make_plan(options, {"PATH": os.defpath, "HOME": str(tmp_path)}).join()
    joiner.set_job("j", str(tmp_path))
    return joiner


class JoinedLauncherBed:
    """One admitted launcher. ``again`` are the connections to later coordinators."""

    def __init__(self, joiner, *steps, again=(), names=(), **settings) -> None:
        self.link = ScriptedLink(*steps)
        self.again = [ScriptedLink(*each) for each in again]
        self._names = [*names, *["j"] * len(self.again)]
        self._links = [self.link, *self.again]
        self.clock = PausableClock()
        self.own, self.signals, self.files, self.records = (
            OwnNode(self.clock),
            Signals(),
            Filed(),
            Records(),
        )
        self.first_rank = -1
        values = {
            "coordinator": "node 0 (h:5)",
            "job_id": "j",
            "max_restarts": 0,
            "failure_grace_s": 5.0,
            "lost_after_s": 60.0,
            "flexible": False,
        }
        self.runner = JoinedRunner(
            settings=JoinedSettings(**{**values, **settings}),
            planner=joiner,
            own=self.own,
            files=self.files,
            sink=self.records,
            events=self.records,
            signal_pipe=self.signals,
            clock=self.clock,
            call=self._call,
            count_from=self._count_from,
        )

    def _call(self):
        welcome = p.Welcome(job_id=self._names.pop(0), rank=1)
        return self.again.pop(0), welcome

    def _count_from(self, rank):
        self.first_rank = rank

    def run(self) -> int:
        """Run to the end. ``link.sent`` then has its messages."""
        try:
            return self.runner.run(self.link)
        finally:
            self.runner.close()
            for thread in threading.enumerate():
                if thread.name == "to the coordinator":
                    thread.join()

    def handled(self, kind: type) -> list:
        return [message for message in self.own.handled if isinstance(message, kind)]

    def sent(self, kind: type, link: int = 0) -> list:
        return [message for message in self._links[link].sent if isinstance(message, kind)]

    def free(self) -> None:
        for each in (*self._links, self.own, self.signals):
            each.free()


@pytest.fixture
def joined_launcher(tmp_path):
    """Return a function that makes a joined launcher."""
    joiner = planner(tmp_path)
    made: list[JoinedLauncherBed] = []

    def make(*steps, **settings) -> JoinedLauncherBed:
        made.append(JoinedLauncherBed(joiner, *steps, **settings))
        return made[-1]

    yield make
    for each in made:
        each.free()
