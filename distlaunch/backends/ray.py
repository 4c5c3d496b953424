"""Machines that are a Ray cluster: it says on which nodes workers run; all else is PyTorch's.

Ray only gives places: a placement group's bundles. Where the nodes and the workers of each are
asked for, a bundle is a node's share, on nodes of their own (STRICT_SPREAD); where only a number of
workers is, each has a bundle, and those on one node are its share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from distlaunch.backends.base import BackendOption, Requirement, Value
from distlaunch.backends.pytorch_ddp import PytorchDdp
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import counted, quoted
from distlaunch.planning.allocation import Allocation, Host, Origin, Unit
from distlaunch.planning.node_source import Location
from distlaunch.planning.train_options import TrainOptions, counts_processes, on_cpus

_STRATEGIES = ("pack", "spread", "strict-pack", "strict-spread")
_NOT_BESIDE = (
    "hosts",
    "hostfile",
    "discover",
    "include",
    "exclude",
    "node_rank",
    "rendezvous",
    "spares",
    "spread",
)
_MOST = 1 << 17
_SHOWN = 64


class Demand(Record):
    """What Ray is asked for."""

    bundles: tuple[Mapping[str, float], ...] | None
    """Resources of each; None: one like ``each`` for every GPU of the cluster."""
    each: Mapping[str, float]
    """What a worker needs."""
    strategy: str
    """Ray's name of it."""
    workers: int
    """Of a bundle."""
    unit: Unit


class Ray(PytorchDdp):
    """PyTorch's environment for workers on the nodes of a Ray cluster."""

    name = "ray"
    about = "workers on the nodes of a Ray cluster (--address auto|local|HOST:PORT|ray://HOST:PORT)"
    requires = (Requirement(module="ray", package="ray[client]", at_least="2.9"),)

    def __init__(self, chosen: Mapping[str, Value], texts: Mapping[str, str]) -> None:
        super().__init__(chosen, texts)
        self._resources = dict(_resources(str(chosen.get("resources", ""))))

    @classmethod
    def options(cls) -> tuple[BackendOption, ...]:
        """List what Ray can be told, and DDP."""
        return (
            BackendOption(
                name="address",
                about="the cluster: auto (the one of RAY_ADDRESS, or of this machine), local (one "
                "started here)",
                metavar="auto|local|HOST:PORT|ray://HOST:PORT",
            ),
            BackendOption(
                name="strategy",
                about="how Ray places the workers of a total (--num-gpus, --num-procs); by default "
                "pack",
                kind="choice",
                choices=_STRATEGIES,
            ),
            BackendOption(
                name="cpus-per-worker",
                about="CPUs that Ray keeps for each worker; by default 1",
                kind="count",
            ),
            BackendOption(
                name="resources",
                about="what else Ray keeps for each worker",
                metavar="NAME=AMOUNT[,NAME=AMOUNT]",
            ),
            *super().options(),
        )

    @property
    def address(self) -> str:
        """The cluster, as ``ray.init`` takes it."""
        return str(self.chosen.get("address", "auto"))

    def demand(self, options: TrainOptions) -> Demand:
        """Say what Ray is to place. Raises ConfigError for what it cannot do."""
        _check(options)
        on_cpu = on_cpus(options)
        each = {
            "CPU": float(self.chosen.get("cpus-per-worker", 1)),
            **({} if on_cpu else {"GPU": 1.0}),
        }
        each = {name: amount for name, amount in {**each, **self._resources}.items() if amount}
        if not each:
            hint = "-o cpus-per-worker=1, or -o resources=NAME=AMOUNT"
            raise ConfigError(
                "-o cpus-per-worker=0: a worker for which Ray keeps nothing has no place", hint=hint
            )
        _check_whole(each)
        unit: Unit = "workers" if on_cpu else "gpus"
        nodes, per_node, total = _sizes(options)
        if per_node is not None and nodes is not None:
            if "strategy" in self.chosen:
                raise ConfigError(
                    "-o strategy is for a number of workers alone: workers of each node are on "
                    "one, nodes are distinct",
                    hint="leave -o strategy out, or --num-nodes",
                )
            share = {name: amount * per_node for name, amount in each.items()}
            _check_whole(share)
            bundles = tuple([share] * nodes)
            return Demand(
                bundles=bundles, each=each, strategy="STRICT_SPREAD", workers=per_node, unit=unit
            )
        strategy = str(self.chosen.get("strategy", "pack")).upper().replace("-", "_")
        alone = None if total is None else tuple([each] * total)
        return Demand(bundles=alone, each=each, strategy=strategy, workers=1, unit=unit)

    def location(self, options: TrainOptions, machine: str) -> Location:
        """Say what is known of the nodes before Ray has placed anything. Raises ConfigError."""
        demand = self.demand(options)
        on_own = demand.strategy == "STRICT_SPREAD" and demand.bundles is not None
        slots = demand.workers if on_own else len(demand.bundles or ()) or None
        count = len(demand.bundles or ()) if on_own else 1
        hosts = [
            Host(name=f"ray-{number}", slots=slots, unit=demand.unit) for number in range(count)
        ]
        return located(
            hosts, machine, "settled at the start: on which nodes of the Ray cluster workers run"
        )


def located(hosts: Sequence[Host], machine: str, *notes: str) -> Location:
    """Say that these are the nodes. ``machine``, ours, is taken for none of them: Ray starts all
    agents."""
    by = "Ray's placement group"
    origin = Origin(value="hosts", shown=",".join(host.name for host in hosts[:_SHOWN]), source=by)
    allocation = Allocation(source="ray", hosts=tuple(hosts), origins=(origin,), notes=notes)
    return Location(allocation=allocation, who="Ray", here=None, by=by, name=machine)


def _check(options: TrainOptions) -> None:
    field = next((field for field in _NOT_BESIDE if options.who_set(field)), None)
    if field is not None:
        raise ConfigError(
            f"{options.named(field)} and --backend ray exclude each other: Ray says which nodes "
            "there are",
            hint="--num-nodes N --gpus-per-node M, or --num-gpus N, says how many it is to give",
        )
    if isinstance(options.num_nodes, tuple):
        low, high = options.num_nodes
        raise ConfigError(
            f"--num-nodes {low}:{high}: with --backend ray the number of nodes is fixed",
            hint=f"--num-nodes {high}; with --max-restarts a lost node is replaced by another of "
            "the cluster",
        )
    if options.gpus is not None:
        raise ConfigError(
            "--gpus and --backend ray exclude each other: Ray says which GPUs workers have"
        )
    if counts_processes(options) and options.device == "cuda":
        raise ConfigError(
            "--device cuda: with --backend ray a worker has a GPU of its own", hint="--num-gpus N"
        )


def _sizes(options: TrainOptions) -> tuple[int | None, int | None, int | None]:
    """Give nodes, workers of each, workers in all; None for what is open. Raises ConfigError."""
    nodes = options.num_nodes if isinstance(options.num_nodes, int) else None
    per_node = options.procs_per_node if options.gpus_per_node is None else options.gpus_per_node
    gpus = options.num_gpus if isinstance(options.num_gpus, int) else None
    total = gpus if options.num_procs is None else options.num_procs
    each = "--procs-per-node" if counts_processes(options) else "--gpus-per-node"
    if total is not None and per_node is not None and nodes is None:
        nodes, rest = divmod(total, per_node)
        if rest:
            raise ConfigError(
                f"{total} workers are no multiple of {each} {per_node}", hint="give one of the two"
            )
    elif total is not None and nodes is not None and per_node is None:
        per_node, rest = divmod(total, nodes)
        if rest or not per_node:
            raise ConfigError(
                f"{counted(total, 'worker')} cannot be divided evenly among "
                f"{counted(nodes, 'node')}",
                hint=f"give a multiple of {nodes}, or leave --num-nodes out",
            )
    elif total is None and (nodes is None) != (per_node is None):
        missing = f"{each} M" if per_node is None else "--num-nodes N"
        given = f"--num-nodes {nodes}" if per_node is None else f"{each} {per_node}"
        raise ConfigError(
            f"{given} alone does not say what Ray is to give", hint=f"give {missing} as well"
        )
    elif total is None and nodes is None and on_cpus(options):
        raise ConfigError(
            "--device cpu alone does not say what Ray is to give", hint="--num-procs N"
        )
    if max(nodes or 0, total or 0) > _MOST:
        raise ConfigError(f"Ray is asked for more than {_MOST:,} bundles")
    return nodes, per_node, total


def _check_whole(bundle: Mapping[str, float]) -> None:
    """Raise ConfigError for what Ray does not share out: amounts above 1 are whole."""
    for name, amount in bundle.items():
        if amount > 1 and amount != int(amount):
            text = (
                f"-o resources: {quoted(name)} would be {amount:g} of a bundle, and Ray takes "
                "no fraction above 1"
            )
            raise ConfigError(
                text, hint="give an amount that is whole, or at most 1 for all workers of a node"
            )


def _resources(text: str) -> Iterator[tuple[str, float]]:
    """Read ``NAME=AMOUNT,...``. Raises ConfigError."""
    for word in filter(None, text.split(",")):
        name, _, amount = (part.strip() for part in word.rpartition("="))
        digits = amount.replace(".", "", 1)
        if not (name and digits.isascii() and digits.isdigit() and len(digits) < 16):
            raise ConfigError(
                f"-o resources: {quoted(word)}: NAME=AMOUNT is needed, as in memory=8000000000"
            )
        if name in {"CPU", "GPU"}:
            hint = "-o cpus-per-worker=N" if name == "CPU" else "--num-gpus N"
            raise ConfigError(
                f"-o resources: {quoted(word)}: Ray keeps these for workers anyway", hint=hint
            )
        if name == "object_store_memory":
            hint = "memory=BYTES is what workers have"
            raise ConfigError(
                f"-o resources: {quoted(word)}: Ray gives that to no actor", hint=hint
            )
        if name == "memory" and float(amount) != int(float(amount)):
            raise ConfigError(
                f"-o resources: {quoted(word)}: bytes are needed, as in memory=8000000000"
            )
        yield name, float(amount)
