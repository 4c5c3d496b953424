"""The ``ray`` backend: a Ray cluster chooses the nodes. Otherwise it is like ``pytorch-ddp``.

Ray reserves the bundles of a placement group; a bundle is resources on one node. With nodes and
workers per node, a bundle is for one node's workers (STRICT_SPREAD); with only a number of workers,
for one worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from distlaunch.backends.base import BackendOption, Requirement, Value
from distlaunch.backends.pytorch_ddp import PytorchDdp
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import counted, quoted
from distlaunch.planning.allocation import Allocation, Host, Origin, Unit
from distlaunch.planning.node_source import Location
from distlaunch.planning.train_options import TrainOptions, counts_processes, on_cpus

_STRATEGIES = ("pack", "spread", "strict-pack", "strict-spread")
_EXCLUDED_OPTIONS = (
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
_MAX_BUNDLES = 1 << 17
_MAX_SHOWN = 64


class PlacementRequest(Record):
    """The resources that distlaunch requests from Ray."""

    bundles: tuple[Mapping[str, float], ...] | None
    """Resources of each bundle. None: one bundle like ``each`` for every GPU of the cluster."""
    each: Mapping[str, float]
    """Resources of a worker."""
    strategy: str
    workers: int
    """Workers per bundle."""
    unit: Unit


class Ray(PytorchDdp):
    """Workers on the nodes of a Ray cluster."""

    name = "ray"
    about = "workers on the nodes of a Ray cluster (--address auto|local|HOST:PORT|ray://HOST:PORT)"
    requires = (Requirement(module="ray", package="ray[client]", at_least="2.9"),)

    def __init__(self, chosen: Mapping[str, Value], texts: Mapping[str, str]) -> None:
        super().__init__(chosen, texts)
        self._resources = dict(_parse_resources(str(chosen.get("resources", ""))))

    @classmethod
    def options(cls) -> tuple[BackendOption, ...]:
        """Return the options for Ray, for communication and for DDP."""
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
                about="CPUs that Ray reserves for each worker; by default 1",
                kind="count",
            ),
            BackendOption(
                name="resources",
                about="other resources that Ray reserves for each worker",
                metavar="NAME=AMOUNT[,NAME=AMOUNT]",
            ),
            *super().options(),
        )

    @property
    def address(self) -> str:
        """The cluster's address for ``ray.init``."""
        return str(self.chosen.get("address", "auto"))

    def placement_request(self, options: TrainOptions) -> PlacementRequest:
        """Return the request to Ray. Raises ConfigError."""
        _check_options(options)
        on_cpu = on_cpus(options)
        each = {
            "CPU": float(self.chosen.get("cpus-per-worker", 1)),
            **({} if on_cpu else {"GPU": 1.0}),
        }
        each = {name: amount for name, amount in {**each, **self._resources}.items() if amount}
        if not each:
            hint = f"{Opt.OPT} cpus-per-worker=1, or {Opt.OPT} resources=NAME=AMOUNT"
            raise ConfigError(
                f"{Opt.OPT} cpus-per-worker=0: Ray cannot place a worker without resources",
                hint=hint,
            )
        _check_fractions(each)
        unit: Unit = "workers" if on_cpu else "gpus"
        nodes, per_node, total = _read_sizes(options)
        if per_node is not None and nodes is not None:
            if "strategy" in self.chosen:
                raise ConfigError(
                    f"{Opt.OPT} strategy is only for a total number of workers: with workers "
                    "per node, each node is one bundle",
                    hint=f"leave {Opt.OPT} strategy out, or {Opt.NUM_NODES}",
                )
            share = {name: amount * per_node for name, amount in each.items()}
            _check_fractions(share)
            bundles = tuple([share] * nodes)
            return PlacementRequest(
                bundles=bundles, each=each, strategy="STRICT_SPREAD", workers=per_node, unit=unit
            )
        strategy = str(self.chosen.get("strategy", "pack")).upper().replace("-", "_")
        single = None if total is None else tuple([each] * total)
        return PlacementRequest(bundles=single, each=each, strategy=strategy, workers=1, unit=unit)

    def location(self, options: TrainOptions, machine: str) -> Location:
        """Return placeholders for the nodes that Ray will choose. Raises ConfigError."""
        placement_request = self.placement_request(options)
        on_own = (
            placement_request.strategy == "STRICT_SPREAD" and placement_request.bundles is not None
        )
        slots = (
            placement_request.workers if on_own else len(placement_request.bundles or ()) or None
        )
        count = len(placement_request.bundles or ()) if on_own else 1
        hosts = [
            Host(name=f"ray-{number}", slots=slots, unit=placement_request.unit)
            for number in range(count)
        ]
        return ray_location(hosts, machine, "Ray chooses the nodes when the job starts")


def ray_location(hosts: Sequence[Host], machine: str, *notes: str) -> Location:
    """Return a location with these hosts as nodes.

    This ``machine`` is no node, because Ray starts all agents.
    """
    by = "Ray's placement group"
    origin = Origin(
        value="hosts", shown=",".join(host.name for host in hosts[:_MAX_SHOWN]), source=by
    )
    allocation = Allocation(source="ray", hosts=tuple(hosts), origins=(origin,), notes=notes)
    return Location(allocation=allocation, who="Ray", here=None, by=by, name=machine)


def _check_options(options: TrainOptions) -> None:
    field = next((field for field in _EXCLUDED_OPTIONS if options.who_set(field)), None)
    if field is not None:
        raise ConfigError(
            f"{options.named(field)} and {Opt.BACKEND} ray exclude each other: Ray chooses the "
            "nodes",
            hint=f"use {Opt.NUM_NODES} N {Opt.GPUS_PER_NODE} M, or {Opt.NUM_GPUS} N",
        )
    if isinstance(options.num_nodes, tuple):
        low, high = options.num_nodes
        raise ConfigError(
            f"{Opt.NUM_NODES(low)}:{high}: with {Opt.BACKEND} ray the number of nodes is fixed",
            hint=f"{Opt.NUM_NODES(high)}; with {Opt.MAX_RESTARTS} a lost node is replaced by "
            "another of "
            "the cluster",
        )
    if options.gpus is not None:
        raise ConfigError(
            f"{Opt.GPUS} and {Opt.BACKEND} ray exclude each other: Ray chooses the GPUs"
        )
    if counts_processes(options) and options.device == "cuda":
        raise ConfigError(
            f"{Opt.DEVICE('cuda')}: with {Opt.BACKEND} ray a worker has a GPU of its own",
            hint=f"{Opt.NUM_GPUS} N",
        )


def _read_sizes(options: TrainOptions) -> tuple[int | None, int | None, int | None]:
    """Return nodes, workers per node and all workers; None for what the user leaves open. Raises
    ConfigError if they contradict each other."""
    nodes = options.num_nodes if isinstance(options.num_nodes, int) else None
    per_node = options.procs_per_node if options.gpus_per_node is None else options.gpus_per_node
    gpus = options.num_gpus if isinstance(options.num_gpus, int) else None
    total = gpus if options.num_procs is None else options.num_procs
    each = str(Opt.PROCS_PER_NODE) if counts_processes(options) else str(Opt.GPUS_PER_NODE)
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
                hint=f"give a multiple of {nodes}, or leave {Opt.NUM_NODES} out",
            )
    elif total is None and (nodes is None) != (per_node is None):
        missing = f"{each} M" if per_node is None else f"{Opt.NUM_NODES} N"
        given = Opt.NUM_NODES(nodes) if per_node is None else f"{each} {per_node}"
        raise ConfigError(
            f"{given} alone does not say how many workers Ray should place",
            hint=f"give {missing} as well",
        )
    elif total is None and nodes is None and on_cpus(options):
        raise ConfigError(
            f"{Opt.DEVICE('cpu')} alone does not say how many workers Ray should place",
            hint=f"{Opt.NUM_PROCS} N",
        )
    if max(nodes or 0, total or 0) > _MAX_BUNDLES:
        raise ConfigError(f"more than {_MAX_BUNDLES:,} bundles for Ray")
    return nodes, per_node, total


def _check_fractions(bundle: Mapping[str, float]) -> None:
    """Raise ConfigError for a fraction above 1, which Ray does not allow."""
    for name, amount in bundle.items():
        if amount > 1 and amount != int(amount):
            text = (
                f"{Opt.OPT} resources: {quoted(name)} would be {amount:g} per bundle, and "
                "Ray allows no fraction above 1"
            )
            raise ConfigError(
                text, hint="give an amount that is whole, or at most 1 for all workers of a node"
            )


def _parse_resources(text: str) -> Iterator[tuple[str, float]]:
    """Parse ``NAME=AMOUNT,...``. Raises ConfigError, also for CPU and GPU, which have options."""
    for item in filter(None, text.split(",")):
        name, _, amount = (part.strip() for part in item.rpartition("="))
        digits = amount.replace(".", "", 1)
        if not (name and digits.isascii() and digits.isdigit() and len(digits) < 16):
            raise ConfigError(
                f"{Opt.OPT} resources: {quoted(item)}: NAME=AMOUNT is needed, as in "
                "memory=8000000000"
            )
        if name in {"CPU", "GPU"}:
            hint = f"{Opt.OPT} cpus-per-worker=N" if name == "CPU" else f"{Opt.NUM_GPUS} N"
            raise ConfigError(
                f"{Opt.OPT} resources: {quoted(item)}: Ray reserves these anyway", hint=hint
            )
        if name == "object_store_memory":
            hint = "use memory=BYTES"
            raise ConfigError(
                f"{Opt.OPT} resources: {quoted(item)}: Ray does not reserve it for actors",
                hint=hint,
            )
        if name == "memory" and float(amount) != int(float(amount)):
            raise ConfigError(
                f"{Opt.OPT} resources: {quoted(item)}: bytes are needed, as in memory=8000000000"
            )
        yield name, float(amount)
