"""Horovod by gloo: its variables for each worker; its store is ours, on the master's port.

``base_environment`` has dropped what an outer launcher set of these. Elastic Horovod is not
offered: its protocol unpickles what comes over the network.

What can be set of Horovod itself: the one table for ``-o``, horovodrun's options and its file.

The names, and what they become, are those of horovodrun 0.28.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from distlaunch.backends.base import Backend, BackendOption, Kind, Requirement, Value
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.host_list import name_hosts
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import printable
from distlaunch.core.model.topology import Topology
from distlaunch.core.protocol.agent_messages import Surveyed
from distlaunch.planning.interfaces import names_of_loopback
from distlaunch.planning.worker_counts import cross_ranks, cross_sizes

_COMPRESSION = BackendOption(
    name="compression",
    about="what wrap() compresses gradients to",
    kind="choice",
    choices=("none", "fp16"),
)
_IN_URLS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_")


class Horovod(Backend):
    """Horovod 0.28 with gloo for control, gloo or NCCL for data."""

    name = "horovod"
    about = "Horovod: its variables and its store; gloo for control, NCCL or gloo for data"
    requires = (
        Requirement(
            module="horovod",
            package="horovod",
            at_least="0.21",
            variables="HOROVOD_WITH_GLOO=1 HOROVOD_WITH_PYTORCH=1",
            see="compiling it beside a new torch takes more: distlaunch help horovod",
        ),
    )
    store = True
    ipv4_only = "Horovod's workers find each other by IPv4 alone"

    def __init__(self, chosen: Mapping[str, Value], texts: Mapping[str, str]) -> None:
        super().__init__(chosen, texts)
        for setting in SETTINGS:
            if not setting.fits(chosen.get(setting.name, 0)):
                raise ConfigError(
                    f"-o {setting.name}={chosen[setting.name]}: it is {setting.most:g} at most"
                )

    @classmethod
    def options(cls) -> tuple[BackendOption, ...]:
        """List the options that ``-o`` takes: what horovodrun has of its own."""
        return (_COMPRESSION, *(setting.option for setting in SETTINGS))

    @property
    def notes(self) -> Sequence[str]:
        """Name what is chosen and changes nothing."""
        return [
            f"-o {setting.name} has no effect without -o {setting.of}"
            for setting in SETTINGS
            if setting.name in self.chosen and is_idle(setting, self.chosen)
        ]

    def job_variables(self, topology: Topology) -> Mapping[str, str]:
        """Name the controller, and how many workers there are."""
        world = topology.world_size
        chosen = self.chosen
        variables = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
        if world is not None:
            variables["HOROVOD_SIZE"] = str(world)
        for setting in SETTINGS:
            if setting.name in chosen and not is_idle(setting, chosen):
                variables[setting.variable] = setting.text(chosen[setting.name])
        return variables

    def default_variables(self, topology: Topology) -> Mapping[str, str]:
        """Keep a job of one machine on its loopback interface, which is always there; show where a
        worker crashes.

        Horovod 0.28 minds the interface only while it starts: its groups for data listen where the
        machine's own name leads, and it crashes where that leads nowhere.
        """
        shown = {"PYTHONFAULTHANDLER": "1"}
        return shown | {"HOROVOD_GLOO_IFACE": "lo"} if len(topology.nodes) == 1 else shown

    def check_meeting(self, surveys: Sequence[Surveyed], hosts: Sequence[str]) -> None:
        """Refuse nodes whose own name leads to a loopback address where not all are one machine.

        Horovod 0.28 has the groups that move data listen where that name leads, whatever
        HOROVOD_GLOO_IFACE says.
        """
        astray = names_of_loopback(surveys, hosts)
        for host, address in astray.items():
            raise ConfigError(
                f"{name_hosts(astray)}: the machine's own name leads to {address}, and Horovod's "
                "workers would listen"
                " there, where no other node reaches them",
                hint=f"in /etc/hosts of {printable(host)} its name has to stand beside the address "
                "that others use",
            )

    def repeated(self) -> Mapping[str, str]:
        """Return where the store is, and the interface that the nodes have found for gloo."""
        return {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "MASTER_ADDR",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "MASTER_PORT",
            "HOROVOD_GLOO_IFACE": "GLOO_SOCKET_IFNAME",
        }

    def node_variables(self, topology: Topology, node_rank: int) -> Mapping[str, str]:
        """Name the node, which has to be unlike all others, and may stand in a URL."""
        host = topology.nodes[node_rank].host
        variables = {
            "HOROVOD_HOSTNAME": host if self._of(topology).distinct else f"node-{node_rank}"
        }
        if (slots := topology.nodes[node_rank].slots) is not None:
            variables["HOROVOD_LOCAL_SIZE"] = str(slots)
        return variables

    def worker_variables(
        self, topology: Topology, node_rank: int, local_rank: int, rank: int
    ) -> Mapping[str, str]:
        """Return the worker's place, also among the workers of all nodes that have its local rank."""
        places = self._of(topology)
        return {
            "HOROVOD_RANK": str(rank),
            "HOROVOD_LOCAL_RANK": str(local_rank),
            "HOROVOD_CROSS_RANK": str(places.ranks[node_rank][local_rank]),
            "HOROVOD_CROSS_SIZE": str(places.sizes[local_rank]),
        }

    def _of(self, topology: Topology) -> _Places:
        places: _Places | None = getattr(self, "_places", None)
        if places is None or places.topology is not topology:
            places = self._places = _Places(topology)
        return places


class _Places:
    """Where workers are among those of all nodes: made once a topology, asked for every worker of
    it."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        hosts = {node.host for node in topology.nodes}
        self.distinct = len(hosts) == len(topology.nodes) and all(
            host and _IN_URLS.issuperset(host) for host in hosts
        )
        """Names of hosts do for all nodes; else all are numbered, as a number beside them may be
        another's name."""
        slots = [node.slots or 0 for node in topology.nodes]
        self.ranks, self.sizes = cross_ranks(slots), cross_sizes(slots)


LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
Section = Literal["params", "autotune", "timeline", "stall_check", "library_options", "logging"]


class Setting(Record):
    """One of them."""

    section: Section
    """Of horovodrun's configuration file."""
    option: BackendOption
    variable: str
    factor: int = 1
    """What a whole number is multiplied with."""
    opposite: bool = False
    """The variable says the opposite of the switch."""
    most: float = float("inf")
    of: str = ""
    """The setting without which this one means nothing."""

    @property
    def name(self) -> str:
        """What ``-o`` and horovodrun call it."""
        return self.option.name

    def fits(self, value: Value) -> bool:
        """Return whether a value of the right kind is not too great."""
        return isinstance(value, str) or value <= self.most

    def text(self, value: Value) -> str:
        """Return what the variable says."""
        if isinstance(value, bool):
            return str(int(value != self.opposite))
        if isinstance(value, float):
            return f"{value:.12g}"
        return (
            str(value * self.factor)
            if isinstance(value, int)
            else value.upper()
            if self.option.choices
            else value
        )


def _at(
    section: Section,
    name: str,
    kind: Kind,
    variable: str,
    about: str,
    *,
    metavar: str = "",
    factor: int = 1,
    opposite: bool = False,
    most: float = float("inf"),
    of: str = "",
    choices: tuple[str, ...] = (),
) -> Setting:
    option = BackendOption(name=name, about=about, kind=kind, metavar=metavar, choices=choices)
    variable = f"HOROVOD_{variable}"
    return Setting(
        section=section,
        option=option,
        variable=variable,
        factor=factor,
        opposite=opposite,
        most=most,
        of=of,
    )


SETTINGS = (
    _at("params", "fusion-threshold-mb", "count", "FUSION_THRESHOLD", "how much is reduced at "
    "once; 0: no fusion",
        metavar="MB", factor=1 << 20),
    _at("params", "cycle-time-ms", "number", "CYCLE_TIME", "how often tensors are collected", metavar="MS"),
    _at("params", "cache-capacity", "count", "CACHE_CAPACITY", "how many tensors' names are kept; "
    "0: none"),
    _at("params", "hierarchical-allreduce", "flag", "HIERARCHICAL_ALLREDUCE",
        "reduce within nodes first, then between them"),
    _at("params", "hierarchical-allgather", "flag", "HIERARCHICAL_ALLGATHER",
        "gather within nodes first, then between them"),
    _at("params", "torus-allreduce", "flag", "TORUS_ALLREDUCE", "reduce in a torus, by NCCL"),
    _at("autotune", "autotune", "flag", "AUTOTUNE", "tune what is not given while training"),
    _at("autotune", "autotune-log-file", "text", "AUTOTUNE_LOG", "where it writes what it tried",
        metavar="FILE", of="autotune"),
    _at("autotune", "autotune-warmup-samples", "count", "AUTOTUNE_WARMUP_SAMPLES", "samples that "
    "it passes over",
        of="autotune"),
    _at("autotune", "autotune-steps-per-sample", "count", "AUTOTUNE_STEPS_PER_SAMPLE", "steps that "
    "it takes for each",
        of="autotune"),
    _at("autotune", "autotune-bayes-opt-max-samples", "count", "AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        "the most samples that it takes", of="autotune"),
    _at("autotune", "autotune-gaussian-process-noise", "number", "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        "how much noise it reckons with, from 0 to 1", metavar="X", most=1.0, of="autotune"),
    _at("timeline", "timeline-filename", "text", "TIMELINE", "write Horovod's timeline of rank 0 "
    "to this file",
        metavar="FILE"),
    _at("timeline", "timeline-mark-cycles", "flag", "TIMELINE_MARK_CYCLES", "mark the cycles on it",
        of="timeline-filename"),
    _at("stall_check", "stall-check", "flag", "STALL_CHECK_DISABLE", "warn of ranks that others "
    "wait for (as it does)",
        opposite=True),
    _at("stall_check", "stall-check-warning-time-seconds", "count", "STALL_CHECK_TIME_SECONDS", "after so long",
        metavar="SECONDS"),
    _at("stall_check", "stall-check-shutdown-time-seconds", "count", "STALL_SHUTDOWN_TIME_SECONDS",
        "end Horovod after so long", metavar="SECONDS"),
    _at("library_options", "mpi-threads-disable", "flag", "MPI_THREADS_DISABLE",
        "a matter of MPI alone, which has no part here"),
    _at("library_options", "num-nccl-streams", "count", "NUM_NCCL_STREAMS", "streams of NCCL"),
    _at("library_options", "thread-affinity", "count", "THREAD_AFFINITY",
        "the CPU of Horovod's own thread, on each node from the first worker's on", metavar="CPU"),
    _at("library_options", "gloo-timeout-seconds", "count", "GLOO_TIMEOUT_SECONDS",
        "how long gloo waits for another worker (30)", metavar="SECONDS"),
    _at("logging", "log-level", "choice", "LOG_LEVEL", "what Horovod logs", choices=LEVELS),
    _at("logging", "log-with-timestamp", "flag", "LOG_HIDE_TIME", "with the time of day in what "
    "Horovod logs",
        opposite=True),
)  # fmt: skip


def is_idle(setting: Setting, chosen: Mapping[str, Value]) -> bool:
    """Return whether it means nothing, since another one is not chosen."""
    return bool(setting.of) and not chosen.get(setting.of)
