"""Layer core.model: a launch plan, complete but for what only the nodes can settle (ports)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Literal

from distlaunch.core.model.layout import TRAIN, Layout
from distlaunch.core.model.record import Record
from distlaunch.core.model.topology import Node


class WorkerPlan(Record):
    """One worker: its place, the variables that only it has, its CPUs."""

    rank: int
    local_rank: int
    node_rank: int
    env: Mapping[str, str]
    cpus: tuple[int, ...] | None
    argv: tuple[str, ...] | None = None
    """Its command line, where that is not the plan's for all."""


class LaunchPlan(Record, hide=("base_env", "given_env")):
    """What is to run where. ``master_port`` is None until ``bind``.

    ``env`` holds what we set for all workers; ``base_env`` is what they inherit, and ``given_env`` what the user gave
    by --env: of the last two, neither values nor events ever show.
    """

    job_id: str
    backend: str
    nodes: tuple[Node, ...]
    workers: tuple[WorkerPlan, ...]
    argv: tuple[str, ...]
    workdir: str
    env: Mapping[str, str]
    base_env: Mapping[str, str]
    given_env: Mapping[str, str]
    run_dir: str
    master_addr: str
    wanted_port: int
    """0: any that is free."""
    master_port: int | None = None
    attempt: int = 0
    signal_group: bool = False
    preload: tuple[str, ...] = ()
    """Modules that each node imports once, to fork its workers from."""
    hang_timeout_s: float | None = None
    """The job is watched for hangs: it may be silent for so long."""
    max_restarts: int = 0
    bootstrap: Literal["", "direct", "setup"] = ""
    """How our code comes into the workers' interpreter, if they need it there."""
    notes: tuple[str, ...] = ()
    layout: Layout = TRAIN

    @property
    def world_size(self) -> int:
        """Number of workers over all nodes."""
        return len(self.workers)

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """The lowest rank of each node."""
        return tuple(itertools.accumulate((node.slots for node in self.nodes[:-1]), initial=0))

    @property
    def shared_env(self) -> dict[str, str]:
        """Everything that all workers of this attempt have; a worker's own ``env`` comes on top."""
        return {**self.base_env, **self.env, **self.given_env}

    def record(self) -> dict[str, object]:
        """Give the plan as data for people and files: no inherited and no user-given values."""
        nodes = [
            {"node_rank": index, "host": node.host, "slots": node.slots, "devices": list(node.devices)}
            for index, node in enumerate(self.nodes)
        ]
        workers = [
            {
                "rank": worker.rank,
                "local_rank": worker.local_rank,
                "node_rank": worker.node_rank,
                "argv": list(self.argv if worker.argv is None else worker.argv),
                "env": {**self.env, **worker.env},
                "cpus": None if worker.cpus is None else list(worker.cpus),
            }
            for worker in self.workers
        ]
        return {
            "job_id": self.job_id,
            "backend": self.backend,
            "attempt": self.attempt,
            "world_size": self.world_size,
            "master_addr": self.master_addr,
            "master_port": self.master_port,
            "workdir": self.workdir,
            "run_dir": self.run_dir,
            "nodes": nodes,
            "workers": workers,
            "max_restarts": self.max_restarts,
            "hang_timeout_s": self.hang_timeout_s,
            "preload": list(self.preload),
            "env_given": sorted(self.given_env),
            "notes": list(self.notes),
        }
