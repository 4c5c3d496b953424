"""Transports with a real agent, a real spawner and real workers behind them."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import sys
import threading
import time
from collections.abc import Callable

import pytest

from distlaunch.coordinator.joined.local_node import LocalNode
from distlaunch.coordinator.policy.events_and_actions import FromNode, Joined
from distlaunch.coordinator.runtime.local_agent import LocalTransport
from distlaunch.coordinator.runtime.remote_agents import RemoteAgents
from distlaunch.coordinator.runtime.remote_output import OutputThread
from distlaunch.core.agent.workers.spawner import start_spawner
from distlaunch.core.model.topology import CpuInventory, GpuInventory
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from distlaunch.transport.bootstrap import agent_zip
from distlaunch.transport.child_process import open_local_agent
from distlaunch.transport.connection import Target

_SET_CHILD_SUBREAPER = 36


class Taken:
    """Files and console in one: keeps the workers' output, by rank and stream. The output thread
    calls it."""

    def __init__(self) -> None:
        self.written: dict[tuple[int, int], bytes] = {}
        self.ended: list[int] = []

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        self.written[rank, stream] = self.written.get((rank, stream), b"") + data

    def rank_ended(self, rank: int, now: float) -> None:
        self.ended.append(rank)

    def tick(self, now: float) -> float | None:
        return None

    def begin_attempt(self, attempt: int) -> None:
        pass

    def has_room(self) -> bool:
        return True

    def on_room(self, wake: Callable[[], None]) -> None:
        self.wake = wake


def open_local(taken: Taken) -> LocalTransport:
    return LocalTransport(
        job_id="contract",
        cookie=os.urandom(8).hex(),
        nofile=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        spawner=start_spawner(job_id="j", orphan_grace_s=1.0),
        sink=taken,
        clock=time.monotonic,
    )


class OneAgent:
    """Connections to one agent, a child process, as to a node on another machine but without the
    network."""

    def __init__(self, taken: Taken) -> None:
        code, environ = agent_zip(), dict(os.environ)
        self.intakes: list[OutputThread] = []

        def output_thread(grant):
            self.intakes.append(OutputThread(taken, nodes=1, grant=grant))
            return self.intakes[0]

        self._agents = RemoteAgents(
            [Target(host="here", here=True)],
            open_connection=lambda target, within_s: open_local_agent(
                target, within_s, code=code, environ=environ
            ),
            fanout=1,
            connect_s=20.0,
            output_thread=output_thread,
            clock=time.monotonic,
        )

    def start(self) -> None:
        self._agents.start()
        self._agents.connect(0, 0.0)
        end = time.monotonic() + 20.0
        while not any(isinstance(event, Joined) for event in self._agents.receive()):
            assert time.monotonic() < end
            time.sleep(0.005)

    def send(self, node: int, message: m.ToAgent) -> None:
        self._agents.send(node, message)

    def descriptors(self) -> dict[int, int]:
        return self._agents.descriptors()

    def deadline(self) -> float | None:
        return None  # the next ping is of no interest here

    def receive(self) -> list:
        events = self._agents.receive()
        if any(isinstance(event.message, (WorkerExit, m.AttemptEnded)) for event in events):
            taken = (
                threading.Event()
            )  # the coordinator's own thread takes output, and these tests look at once
            self.intakes[0]._enqueue(lambda _: taken.set())
            assert taken.wait(20)
        return events

    def close(self) -> None:
        self._agents.close()


class OneNode:
    """The coordinator's own node, with a launcher on each node, as a transport."""

    def __init__(self, taken: Taken) -> None:
        self._own = LocalNode(
            job_id="contract",
            nofile=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            spawner=start_spawner(job_id="j", orphan_grace_s=1.0),
            sink=taken,
            clock=time.monotonic,
            gpus=GpuInventory(),
            cpus=CpuInventory(allowed=(0,), online=1),
        )
        self.start, self.descriptors, self.deadline = (
            self._own.start,
            self._own.descriptors,
            self._own.deadline,
        )
        self.close = self._own.close

    def send(self, node: int, message: m.ToAgent) -> None:
        self._own.handle(message)

    def receive(self) -> list:
        return [FromNode(node=0, message=message) for message in self._own.receive()]


TRANSPORTS = {"local": open_local, "an agent of its own": OneAgent, "own node": OneNode}


class Coordinator:
    """The coordinator's side. It waits as the runner does: by poll on ``descriptors`` until
    ``deadline``."""

    def __init__(self, open_transport) -> None:
        self.taken = Taken()
        self.transport = open_transport(self.taken)
        self.is_local = not isinstance(self.transport, OneAgent)
        self.received: list[m.FromAgent] = []
        self._closed = False
        self.transport.start()

    def send(self, message: m.ToAgent) -> None:
        self.transport.send(0, message)

    def start(self, *scripts: str, attempt: int = 0, env=None, specs=None, **changed) -> None:
        """Start one Python worker for each script."""
        workers = tuple(
            m.WorkerSpec(
                rank=rank,
                local_rank=rank,
                argv=(sys.executable, "-I", "-S", "-c", script),
                env={"RANK": str(rank)},
                cpus=None,
                error_file=None,
            )
            for rank, script in enumerate(scripts)
        )
        values = {
            "attempt": attempt,
            "argv": ("unused",),
            "env": {"PATH": os.defpath, **(env or {})},
            "cwd": "/",
            "workers": specs or workers,
            "uses_gpus": False,
            "signal_group": False,
            "terminal": False,
            "rows": 0,
            "columns": 0,
            "stdin_rank": None,
        }
        self.send(m.Start(**{**values, **changed}))

    def wait(self, condition: Callable[[], object], *, within_s: float = 20.0) -> None:
        """Receive until the condition is true."""
        end = time.monotonic() + within_s
        while True:
            for event in self.transport.receive():
                assert event.node == 0
                self.received.append(event.message)
            if condition():
                return
            assert time.monotonic() < end, f"waited in vain; received {self.received}"
            poll = select.poll()
            for descriptor, events in self.transport.descriptors().items():
                poll.register(descriptor, events)
            deadline = self.transport.deadline()
            until = end if deadline is None else min(deadline, end)
            poll.poll(max(0.0, until - time.monotonic()) * 1000 + 1)

    def of(self, kind: type) -> list:
        return [message for message in self.received if isinstance(message, kind)]

    def until(self, kind: type, count: int = 1) -> list:
        self.wait(lambda: len(self.of(kind)) >= count)
        return self.of(kind)

    def prepare(self, *, port: int | None = 0, attempt: int = 0) -> m.Prepared:
        before = len(self.of(m.Prepared))
        self.send(m.Prepare(attempt=attempt, port=port))
        return self.until(m.Prepared, before + 1)[-1]

    def until_written(self, rank: int, text: bytes, stream: int = 1) -> None:
        """Wait for output of a worker, which wakes only the output thread."""
        end = time.monotonic() + 20
        while text not in self.taken.written.get((rank, stream), b""):
            assert time.monotonic() < end, self.taken.written
            self.received.extend(event.message for event in self.transport.receive())
            time.sleep(0.005)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.transport.close()


@pytest.fixture
def open_coordinator(clean_env, tmp_path, monkeypatch):
    """Return a function that opens a coordinator over a transport."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    opened = []

    def open_it(open_transport) -> Coordinator:
        opened.append(Coordinator(open_transport))
        return opened[-1]

    yield open_it
    for each in opened:
        each.close()
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)  # other tests' orphans are not for us


@pytest.fixture(params=TRANSPORTS)
def coordinator(request, open_coordinator):
    return open_coordinator(TRANSPORTS[request.param])
