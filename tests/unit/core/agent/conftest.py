"""A worker table. Tests play the agent and the spawner."""

from __future__ import annotations

import pytest

from distlaunch.core.agent.workers import worker_table as t
from distlaunch.core.agent.workers.output_pump import Drained, OutputsClosed
from distlaunch.core.model.record import replace
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import spawner_messages as w


def spec(rank: int, **changed) -> m.WorkerSpec:
    values = {
        "rank": rank,
        "local_rank": rank,
        "argv": None,
        "env": {},
        "cpus": None,
        "error_file": None,
        **changed,
    }
    return m.WorkerSpec(**values)


class Node:
    """One node's table. ``now`` is its clock, ``actions`` has all of its actions."""

    def __init__(self) -> None:
        self.table = t.WorkerTable()
        self.now = 0.0
        self.actions: list[t.Action] = []

    def step(self, event: t.Event) -> list[t.Action]:
        actions = self.table.step(event, self.now)
        self.actions += actions
        return actions

    def start(self, ranks=2, *, attempt=0, signal_group=False, specs=None) -> list[t.Action]:
        workers = tuple(spec(rank) for rank in range(ranks)) if specs is None else tuple(specs)
        start = m.Start(
            attempt=attempt,
            argv=("python", "train.py"),
            env={},
            cwd="/",
            workers=workers,
            uses_gpus=False,
            signal_group=signal_group,
            terminal=False,
            rows=0,
            columns=0,
            stdin_rank=None,
        )
        return self.step(start)

    def stop(self, *, signum=15, grace_s=10.0, attempt=0) -> list[t.Action]:
        return self.step(m.Stop(attempt=attempt, signum=signum, grace_s=grace_s))

    def spawned(self, rank: int) -> list[t.Action]:
        return self.step(w.Spawned(rank=rank, pid=100 + rank))

    def not_spawned(self, rank: int, step: str, errno: int) -> list[t.Action]:
        return self.step(w.SpawnFailed(rank=rank, step=step, errno=errno))

    def ended(self, rank: int, returncode: int = 0) -> list[t.Action]:
        return self.step(WorkerExit(rank=rank, pid=100 + rank, returncode=returncode))

    def drained(self, rank: int, *, tail=b"", error_file=None, oom_kills=0) -> list[t.Action]:
        worker = self.table.workers.get(rank)
        ended = (worker and worker.exit) or WorkerExit(rank=rank, pid=100 + rank, returncode=0)
        found = replace(
            ended,
            stderr_tail=tail + ended.stderr_tail,
            error_file=error_file,
            oom_kills=oom_kills,
        )
        return self.step(Drained(exit=found))

    def swept(self, *left: int) -> list[t.Action]:
        return self.step(w.Swept(left=left))

    def closed(self) -> list[t.Action]:
        return self.step(OutputsClosed())

    def tick(self) -> list[t.Action]:
        return self.step(t.DeadlineReached())

    def up(self, ranks=2, **start) -> Node:
        self.start(ranks, **start)
        for rank in range(ranks):
            self.spawned(rank)
        return self

    def finish(self) -> list[t.Action]:
        """End the left processes and answer the sweep."""
        for rank in list(self.table.running):
            self.ended(rank)
        for rank in list(self.table.workers):
            self.drained(rank)
        return [*self.swept(), *self.closed()]

    def of(self, kind: type, actions=None) -> list:
        return [
            action
            for action in (self.actions if actions is None else actions)
            if isinstance(action, kind)
        ]


@pytest.fixture(scope="session")
def make_node() -> type[Node]:
    return Node


@pytest.fixture(scope="session")
def make_spec():
    return spec
