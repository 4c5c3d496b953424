"""The launch plan: which workers run on which nodes, with which command, variables and CPUs.

Ports and worker counts of other nodes are added when the nodes have reported them.
"""

from __future__ import annotations

import itertools
import os.path
from collections.abc import Container, Iterator, Mapping
from typing import Literal

from distlaunch.core.model.record import Record
from distlaunch.core.model.run_files import TRAIN, Layout
from distlaunch.core.model.topology import Gpu, Node, total_slots
from distlaunch.core.model.variables import SET_FOR_NODES

PLAN_SCHEMA = 1
"""Increased when a field of a recorded plan changes its meaning or is removed."""
_SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
_MASKED = "***"


class WorkerPlan(Record):
    """One worker of the plan. ``env`` holds its own variables."""

    rank: int
    local_rank: int
    node_rank: int
    env: Mapping[str, str]
    cpus: tuple[int, ...] | None
    argv: tuple[str, ...] | None = None
    """The worker's command line if it differs from the plan's."""


class OuterLauncher(Record):
    """Another launcher of which this launcher is a worker, and the worker's ranks."""

    launcher: str
    """``torchrun``, ``horovodrun``, ``accelerate``, ``deepspeed`` or ``distlaunch``."""
    rank: int
    world_size: int
    local_rank: int


class LaunchPlan(Record, hide=("base_env", "given_env")):
    """The workers to start, their nodes, command and variables.

    ``master_addr`` is None until the node of rank 0 is known, ``master_port`` until that node has
    reserved a port. Variables: ``env`` is set by distlaunch for all workers, ``base_env`` is
    inherited by them, ``given_env`` is set by the user with --env. Values in ``base_env`` and
    ``given_env`` are never shown or recorded.
    """

    job_id: str
    source: str = "local"
    """The source that named the nodes: ``flags``, ``slurm``, ...; ``local`` if there is none."""
    backend: str
    nodes: tuple[Node, ...]
    workers: tuple[WorkerPlan, ...]
    """Workers in rank order, up to the first node of unknown size."""
    device: str = "auto"
    """The workers' device: ``cuda``, ``cpu``, or ``auto`` if each node decides."""
    argv: tuple[str, ...]
    workdir: str
    env: Mapping[str, str]
    base_env: Mapping[str, str]
    given_env: Mapping[str, str]
    run_dir: str
    master_addr: str | None
    wanted_port: int
    """The requested port. 0 means any free port."""
    bounds: tuple[int, int] | None = None
    """Smallest and largest number of nodes of an elastic job."""
    spares: tuple[Node, ...] = ()
    """Hosts that replace lost nodes."""
    master_port: int | None = None
    attempt: int = 0
    signal_group: bool = False
    preload: tuple[str, ...] = ()
    """Modules that each node imports once, before it forks its workers."""
    hang_timeout_s: float | None = None
    """How long the job may be silent before it is considered hung. None: hangs are not detected."""
    hang_action: Literal["stop", "restart", "report"] = "stop"
    hang_notice_s: float | None = None
    """After this time without a sign of activity the user gets one notice about the workers."""
    max_restarts: int = 0
    restart_delay_s: tuple[float, float] | None = None
    """The delay before the first of several successive restarts, and the largest delay."""
    bootstrap: Literal["", "direct", "setup"] = ""
    """How distlaunch's code is loaded into the workers' interpreter. Empty: not at all."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Like ``notes``, for probable mistakes. ``record`` lists them among the notes."""
    layout: Layout = TRAIN
    repeated: Mapping[str, str] = {}
    """Variables with the same value as another one: name -> name of the other."""
    store: bool = False
    """Whether an agent serves Horovod's store on the master port, for the workers to find each
    other."""
    worker_ports: int = 0
    """Number of ports that a node reserves for each worker."""
    cluster: tuple[str, ...] = ()
    """``HOST:PORT`` of each worker's reserved port, by rank, once the ports are known."""
    env_starts: Mapping[str, str] = {}
    """Beginnings of variables that describe the whole cluster and grow with the job. The value in
    the worker's ``env`` follows."""
    attempt_files: Mapping[str, str] = {}
    """Variables that name a file in the attempt's directory: variable -> file name."""
    shared_memory: tuple[str, ...] = ()
    """Names of files that a worker may leave in /dev/shm, with {uid}, {address}, {port} and
    {rank}."""
    outer: OuterLauncher | None = None
    """Set if another launcher started this one. The plan then has one worker, with rank 0 in the
    plan and ``outer.rank`` in the other launcher's job."""

    @property
    def name(self) -> str:
        """The id of the job; with a number if a run directory of this id existed before."""
        folder = os.path.basename(self.run_dir or "")
        same, _, number = folder.rpartition("-")
        return folder if same == self.job_id and number.isdecimal() else self.job_id

    @property
    def shown_size(self) -> int:
        """World size for messages: the number of workers, of the outer launcher's job if there is
        an outer launcher."""
        return len(self.workers) if self.outer is None else self.outer.world_size

    @property
    def first_shown(self) -> int:
        """The rank that messages show for rank 0 of this plan."""
        return 0 if self.outer is None else self.outer.rank

    @property
    def world_size(self) -> int | None:
        """The number of workers on all nodes; None until every node has reported its number."""
        return total_slots(self.nodes)

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """The lowest rank of each node, as far as ranks are known."""
        known = itertools.takewhile(
            lambda slots: slots is not None, (node.slots for node in self.nodes[:-1])
        )
        return tuple(itertools.accumulate((slots or 0 for slots in known), initial=0))

    @property
    def shared_env(self) -> dict[str, str]:
        """The variables of all workers of this attempt. A worker's own ``env`` overrides them."""
        return {**self.base_env, **self.env, **self.given_env}

    def record(self, *, expand: bool = False) -> dict[str, object]:
        """Return the plan as data for users and files, without values of inherited and user-set
        variables.

        A worker's ``env`` contains its own variables, with ``expand`` also the shared ones. If a
        variable is in ``env_starts``, ``env`` contains only the part after that beginning. Secrets
        are masked.
        """
        return {**self._record_head(), "nodes": list(self._node_records(expand=expand))}

    def json_chunks(
        self, *, expand: bool = False, more: Mapping[str, object] | None = None
    ) -> Iterator[str]:
        """Yield the record as pieces of JSON text, with the keys of ``more``, and a line for each
        worker.

        ``expand``: as in ``record``. The whole text for 131,072 workers might not fit in memory.
        """
        import json

        write = json.JSONEncoder(check_circular=False).encode
        yield "{\n"
        for key, value in {**self._record_head(), **(more or {})}.items():
            text = (
                json.dumps(value, indent=1).replace("\n", "\n ")
                if isinstance(value, dict)
                else write(value)
            )
            yield f" {write(key)}: {text},\n"
        yield ' "nodes": [\n'
        end = ""
        for node in self._node_records(expand=expand):
            workers = node.pop("workers")
            lines = ",\n   ".join(map(write, workers)) if isinstance(workers, list) else None
            shown = "null" if lines is None else f"[\n   {lines}\n  ]"
            yield f'{end}  {write(node)[:-1]}, "workers": {shown}}}'
            end = ",\n"
        yield "\n ]\n}\n"

    def _record_head(self) -> dict[str, object]:
        fewest, most = self.bounds or (len(self.nodes), len(self.nodes))
        return {
            "schema": PLAN_SCHEMA,
            "job_id": self.job_id or None,
            "source": self.source,
            "backend": self.backend,
            "device": self.device,
            "attempt": self.attempt,
            "world_size": self.world_size,
            "min_nodes": fewest,
            "max_nodes": most,
            "spares": [node.host for node in self.spares if node.known],
            "master_addr": self.master_addr,
            "master_port": self.master_port,
            "workdir": self.workdir,
            "run_dir": self.run_dir or None,
            "max_restarts": self.max_restarts,
            **({"restart_delay_s": list(self.restart_delay_s)} if self.restart_delay_s else {}),
            "hang_timeout_s": self.hang_timeout_s,
            **({"hang_action": self.hang_action} if self.hang_timeout_s else {}),
            "preload": list(self.preload),
            "env": {**_Mask()(self.env)},
            **({"env_starts": {**_Mask()(self.env_starts)}} if self.env_starts else {}),
            "env_given": sorted(self.given_env),
            "notes": [*self.warnings, *self.notes],
        }

    def _node_records(self, *, expand: bool) -> Iterator[dict[str, object]]:
        argv, mask = list(self.argv), _Mask()
        settled = {*SET_FOR_NODES, *self.repeated}
        shared = mask(self.env) if expand else {}
        by_node = {
            rank: list(those)
            for rank, those in itertools.groupby(self.workers, lambda each: each.node_rank)
        }
        for node_rank, node in enumerate(self.nodes):
            planned = by_node.pop(node_rank, None)
            own = argv if node.argv is None else list(node.argv)
            workers = (
                None
                if planned is None
                else [self._of_worker(each, own, shared, mask) for each in planned]
            )
            if workers and self.outer is not None:
                workers[0] |= {"rank": self.outer.rank, "local_rank": self.outer.local_rank}
            yield {**_of_node(node_rank, node, settled), "workers": workers}

    @staticmethod
    def _of_worker(
        worker: WorkerPlan, argv: list[str], shared: Mapping[str, str], mask: _Mask
    ) -> dict[str, object]:
        return {
            "rank": worker.rank,
            "local_rank": worker.local_rank,
            "argv": argv if worker.argv is None else list(worker.argv),
            "env": {**shared, **mask(worker.env)},
            "cpus": None if worker.cpus is None else list(worker.cpus),
        }


class _Mask:
    """Replaces values by stars if the name of the variable suggests a secret."""

    def __init__(self) -> None:
        self._harmless: set[str] = set()

    def __call__(self, env: Mapping[str, str]) -> Mapping[str, str]:
        names = env.keys()
        if names <= self._harmless:  # true for every worker after the first
            return env
        self._harmless.update(
            name for name in names if not any(word in name.upper() for word in _SECRETS)
        )
        return {name: value if name in self._harmless else _MASKED for name, value in env.items()}


def _of_node(node_rank: int, node: Node, settled: Container[str]) -> dict[str, object]:
    """Return the record of a node.

    ``settled`` are the node's variables that distlaunch sets. Inherited ones are left out.
    """
    devices = None if node.devices is None else list(node.devices)
    host = node.host if node.known else None
    about: dict[str, object] = {
        "host": host,
        "node_rank": node_rank,
        "slots": node.slots,
        "devices": devices,
    }
    if any(node.gpus):
        about["gpus"] = [
            _of_gpu(each, gpu) for each, gpu in zip(node.devices or (), node.gpus, strict=False)
        ]
    own = {name: value for name, value in node.env.items() if name in settled}
    extras: dict[str, object] = {"env": own}
    extras |= {
        "label": None if node.known else node.host,
        "user": node.user,
        "port": node.port,
        "chosen": list(node.chosen or ()),
        "without": list(node.without),
    }
    return about | {name: value for name, value in extras.items() if value}


def _of_gpu(device: str, gpu: Gpu | None) -> dict[str, object] | None:
    """Return the record of the GPU of a device of the mask; None without a GPU. A MIG slice has its
    own UUID."""
    if gpu is None:
        return None
    uuid = device if device.startswith("MIG-") else gpu.uuid
    return {"device": device, "index": gpu.index, "uuid": uuid, "name": gpu.name}
