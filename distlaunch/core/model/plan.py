"""A launch plan, complete but for what only the nodes can settle (ports, slots of other
machines)."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping
from typing import Literal

from distlaunch.core.model.record import Record
from distlaunch.core.model.run_files import TRAIN, Layout
from distlaunch.core.model.topology import Gpu, Node, total_slots
from distlaunch.core.model.variables import SET_FOR_NODES

_SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
_MASKED = "***"


class WorkerPlan(Record):
    """One worker: its place, the variables that only it has, its CPUs."""

    rank: int
    local_rank: int
    node_rank: int
    env: Mapping[str, str]
    cpus: tuple[int, ...] | None
    argv: tuple[str, ...] | None = None
    """Its command line, where that is not the plan's for all."""


class Outer(Record):
    """The launcher that started this launcher as one of its workers, and which one that is."""

    launcher: str
    """``torchrun``, ``horovodrun``, ``accelerate``, ``deepspeed`` or ``distlaunch``."""
    rank: int
    world_size: int
    local_rank: int


class LaunchPlan(Record, hide=("base_env", "given_env")):
    """What is to run where. ``master_port`` is None until ``bind``, ``master_addr`` until rank 0's
    node is known.

    ``env`` holds what we set for all workers; ``base_env`` is what they inherit, and ``given_env``
    what the user gave by --env: of the last two, neither values nor events ever show.
    """

    job_id: str
    source: str = "local"
    """Who said which nodes there are."""
    backend: str
    nodes: tuple[Node, ...]
    workers: tuple[WorkerPlan, ...]
    """In rank order; none from the first node on whose slots are not known."""
    device: str = "auto"
    """What the workers compute on: ``cuda``, ``cpu``; ``auto`` where the nodes decide."""
    argv: tuple[str, ...]
    workdir: str
    env: Mapping[str, str]
    base_env: Mapping[str, str]
    given_env: Mapping[str, str]
    run_dir: str
    master_addr: str | None
    wanted_port: int
    """0: any that is free."""
    bounds: tuple[int, int] | None = None
    """Smallest and largest number of nodes, if the job is elastic."""
    spares: tuple[Node, ...] = ()
    """Hosts that stand by."""
    master_port: int | None = None
    attempt: int = 0
    signal_group: bool = False
    preload: tuple[str, ...] = ()
    """Modules that each node imports once, to fork its workers from."""
    hang_timeout_s: float | None = None
    """The job is watched for hangs: it may be silent for so long."""
    hang_notice_s: float | None = None
    """After so long a silence the user is told, once, where the workers stand."""
    max_restarts: int = 0
    restart_delay_s: tuple[float, float] | None = None
    """Before the first restart in a row, and at most."""
    bootstrap: Literal["", "direct", "setup"] = ""
    """How our code comes into the workers' interpreter, if they need it there."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Like ``notes``, but the user has probably asked for something else. The record has them among
    its notes."""
    layout: Layout = TRAIN
    repeated: Mapping[str, str] = {}
    """By variable: which of ours has its value, once that is settled."""
    store: bool = False
    """Workers find each other by a store of ours on the master's port."""
    worker_ports: int = 0
    """How many ports its node holds for each worker."""
    cluster: tuple[str, ...] = ()
    """``HOST:PORT`` of each of them, by rank, once that is settled."""
    env_starts: Mapping[str, str] = {}
    """How variables begin that tell of these, the same for all workers: a worker's own value goes
    on there."""
    attempt_files: Mapping[str, str] = {}
    """By variable: a file in the attempt's folder that it is to name."""
    shared_memory: tuple[str, ...] = ()
    """Names of the files that each worker may leave in /dev/shm, with {uid}, {address}, {port} and
    {rank} in them."""
    outer: Outer | None = None
    """The one worker has rank 0 in this plan, and in the job of this launcher the rank that is
    given here."""

    @property
    def shown_size(self) -> int:
        """The number of workers that ranks shown to people count among."""
        return len(self.workers) if self.outer is None else self.outer.world_size

    @property
    def first_shown(self) -> int:
        """The rank that people know rank 0 of this plan by."""
        return 0 if self.outer is None else self.outer.rank

    @property
    def world_size(self) -> int | None:
        """Number of workers over all nodes; None while a node has yet to tell how many it runs."""
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
        """Everything that all workers of this attempt have; a worker's own ``env`` comes on top."""
        return {**self.base_env, **self.env, **self.given_env}

    def record(self, *, expand: bool = False) -> dict[str, object]:
        """Return the plan as data for people and files: no inherited and no user-given values.

        A worker's ``env`` holds what the others do not have, of a variable in ``env_starts`` how it
        goes on there; with ``expand`` also what all share. Secrets are masked.
        """
        return {**self._head(), "nodes": list(self._node_records(expand=expand))}

    def json_chunks(
        self, *, expand: bool = False, more: Mapping[str, object] | None = None
    ) -> Iterator[str]:
        """Return the record, with ``more`` keys, as JSON, piece by piece: that of 131,072 workers
        need not fit in memory.

        A worker stands on a line of its own.
        """
        import json

        write = json.JSONEncoder(check_circular=False).encode
        yield "{\n"
        for key, value in {**self._head(), **(more or {})}.items():
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

    def _head(self) -> dict[str, object]:
        """Return what the record says of the job as a whole."""
        fewest, most = self.bounds or (len(self.nodes), len(self.nodes))
        return {
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
    """Puts stars for the values of variables that hold secrets, by their names."""

    def __init__(self) -> None:
        self._harmless: set[str] = set()

    def __call__(self, env: Mapping[str, str]) -> Mapping[str, str]:
        names = env.keys()
        if names <= self._harmless:  # as with every worker after the first
            return env
        self._harmless.update(
            name for name in names if not any(word in name.upper() for word in _SECRETS)
        )
        return {name: value if name in self._harmless else _MASKED for name, value in env.items()}


def _of_node(node_rank: int, node: Node, settled: Container[str]) -> dict[str, object]:
    """Say what is known of a node; ``settled``: variables of its own that we set, beside those
    which it inherits."""
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
    told = {name: value for name, value in node.env.items() if name in settled}
    extras: dict[str, object] = {"env": told}
    extras |= {
        "user": node.user,
        "port": node.port,
        "chosen": list(node.chosen or ()),
        "without": list(node.without),
    }
    return about | {name: value for name, value in extras.items() if value}


def _of_gpu(device: str, gpu: Gpu | None) -> dict[str, object] | None:
    """Say which GPU a device of the mask is; a slice of one has a UUID of its own."""
    if gpu is None:
        return None
    uuid = device if device.startswith("MIG-") else gpu.uuid
    return {"device": device, "index": gpu.index, "uuid": uuid, "name": gpu.name}
