"""The ``horovod`` backend: sets the variables of Horovod 0.28 for each worker.

``-o``, horovodrun's options and its configuration file all use ``SETTINGS``. Workers rendezvous at
a store that distlaunch serves on MASTER_PORT. Elastic Horovod is not supported: its protocol
unpickles data from the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from distlaunch.backends.base import Backend, BackendOption, Kind, Requirement, Value
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.host_list import name_hosts
from distlaunch.core.model.option_names import Opt
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
    """Horovod 0.28, with gloo for control, and gloo or NCCL for data."""

    name = "horovod"
    about = "Horovod: its variables and its store; gloo for control, NCCL or gloo for data"
    requires = (
        Requirement(
            module="horovod",
            package="horovod",
            at_least="0.21",
            variables="HOROVOD_WITH_GLOO=1 HOROVOD_WITH_PYTORCH=1",
            see="to compile it with a new torch, see distlaunch help horovod",
        ),
    )
    store = True
    ipv4_only = "Horovod's workers connect by IPv4 only"

    def __init__(self, chosen: Mapping[str, Value], texts: Mapping[str, str]) -> None:
        super().__init__(chosen, texts)
        for setting in SETTINGS:
            if not setting.fits(chosen.get(setting.name, 0)):
                raise ConfigError(
                    f"{Opt.OPT(setting.name)}={chosen[setting.name]}: the maximum is "
                    f"{setting.most:g}"
                )

    @classmethod
    def options(cls) -> tuple[BackendOption, ...]:
        """Return the compression, and horovodrun's settings."""
        return (_COMPRESSION, *(setting.option for setting in SETTINGS))

    @property
    def notes(self) -> Sequence[str]:
        """Notices about settings without effect."""
        return [
            f"{Opt.OPT(setting.name)} has no effect without {Opt.OPT(setting.depends_on)}"
            for setting in SETTINGS
            if setting.name in self.chosen and has_no_effect(setting, self.chosen)
        ]

    def job_variables(self, topology: Topology) -> Mapping[str, str]:
        """Return the controller, the number of workers and the settings."""
        world = topology.world_size
        chosen = self.chosen
        variables = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
        if world is not None:
            variables["HOROVOD_SIZE"] = str(world)
        for setting in SETTINGS:
            if setting.name in chosen and not has_no_effect(setting, chosen):
                variables[setting.variable] = setting.text(chosen[setting.name])
        return variables

    def default_variables(self, topology: Topology) -> Mapping[str, str]:
        """Return the loopback interface for a job on one node, and Python's fault handler.

        Horovod 0.28 uses this interface only during start-up. Its groups for data listen at the
        address of the machine's own name; if the name has no address, a worker crashes.
        """
        shown = {"PYTHONFAULTHANDLER": "1"}
        return shown | {"HOROVOD_GLOO_IFACE": "lo"} if len(topology.nodes) == 1 else shown

    def check_nodes(self, surveys: Sequence[Surveyed], hosts: Sequence[str]) -> None:
        """Raise ConfigError if a node resolves its own name to a loopback address.

        The groups for data of Horovod 0.28 listen there, even if HOROVOD_GLOO_IFACE names another
        interface.
        """
        loopback = names_of_loopback(surveys, hosts)
        for host, address in loopback.items():
            raise ConfigError(
                f"{name_hosts(loopback)}: the machine's own name resolves to "
                f"{address}, where other nodes cannot reach Horovod's workers",
                hint=f"in /etc/hosts of {printable(host)}, put its name on the line "
                "of the address that other nodes use",
            )

    def repeated(self) -> Mapping[str, str]:
        """Return variables for the store's address and for gloo's interface."""
        return {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "MASTER_ADDR",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "MASTER_PORT",
            "HOROVOD_GLOO_IFACE": "GLOO_SOCKET_IFNAME",
        }

    def node_variables(self, topology: Topology, node_rank: int) -> Mapping[str, str]:
        """Return the node's number of workers, and its name, unique and valid in a URL."""
        host = topology.nodes[node_rank].host
        variables = {
            "HOROVOD_HOSTNAME": host
            if self._cross_ranks(topology).has_unique_hosts
            else f"node-{node_rank}"
        }
        if (slots := topology.nodes[node_rank].slots) is not None:
            variables["HOROVOD_LOCAL_SIZE"] = str(slots)
        return variables

    def worker_variables(
        self, topology: Topology, node_rank: int, local_rank: int, rank: int
    ) -> Mapping[str, str]:
        """Return the worker's rank, local rank, cross rank and cross size.

        The cross rank numbers the workers with the same local rank; the cross size is their number.
        """
        cross = self._cross_ranks(topology)
        return {
            "HOROVOD_RANK": str(rank),
            "HOROVOD_LOCAL_RANK": str(local_rank),
            "HOROVOD_CROSS_RANK": str(cross.ranks[node_rank][local_rank]),
            "HOROVOD_CROSS_SIZE": str(cross.sizes[local_rank]),
        }

    def _cross_ranks(self, topology: Topology) -> _CrossRanks:
        cross: _CrossRanks | None = getattr(self, "_cached_cross_ranks", None)
        if cross is None or cross.topology is not topology:
            cross = self._cached_cross_ranks = _CrossRanks(topology)
        return cross


class _CrossRanks:
    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        hosts = {node.host for node in topology.nodes}
        self.has_unique_hosts = len(hosts) == len(topology.nodes) and all(
            host and _IN_URLS.issuperset(host) for host in hosts
        )
        """If host names are not unique, all nodes are numbered: a number could equal the name of
        another host."""
        slots = [node.slots or 0 for node in topology.nodes]
        self.ranks, self.sizes = cross_ranks(slots), cross_sizes(slots)


LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
Section = Literal["params", "autotune", "timeline", "stall_check", "library_options", "logging"]


class HorovodSetting(Record):
    """A setting of Horovod, with its option and its variable."""

    section: Section
    """The section in horovodrun's configuration file."""
    option: BackendOption
    variable: str
    factor: int = 1
    """Multiplier for whole numbers."""
    opposite: bool = False
    """Whether the variable is true when the option is off."""
    most: float = float("inf")
    depends_on: str = ""
    """The setting without which this one has no effect."""

    @property
    def name(self) -> str:
        """The name for ``-o`` and for horovodrun."""
        return self.option.name

    def fits(self, value: Value) -> bool:
        """Return whether a value is at most ``most``. Texts always are."""
        return isinstance(value, str) or value <= self.most

    def text(self, value: Value) -> str:
        """Return the variable's text for a value of the option."""
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


def _setting(
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
    depends_on: str = "",
    choices: tuple[str, ...] = (),
) -> HorovodSetting:
    option = BackendOption(name=name, about=about, kind=kind, metavar=metavar, choices=choices)
    variable = f"HOROVOD_{variable}"
    return HorovodSetting(
        section=section,
        option=option,
        variable=variable,
        factor=factor,
        opposite=opposite,
        most=most,
        depends_on=depends_on,
    )


SETTINGS = (
    _setting("params", "fusion-threshold-mb", "count", "FUSION_THRESHOLD", "how much is reduced at "
    "once; 0: no fusion",
        metavar="MB", factor=1 << 20),
    _setting("params", "cycle-time-ms", "number", "CYCLE_TIME", "how often tensors are collected", metavar="MS"),
    _setting("params", "cache-capacity", "count", "CACHE_CAPACITY", "how many tensors' names are kept; "
    "0: none"),
    _setting("params", "hierarchical-allreduce", "flag", "HIERARCHICAL_ALLREDUCE",
        "reduce within nodes first, then between them"),
    _setting("params", "hierarchical-allgather", "flag", "HIERARCHICAL_ALLGATHER",
        "gather within nodes first, then between them"),
    _setting("params", "torus-allreduce", "flag", "TORUS_ALLREDUCE", "reduce in a torus, by NCCL"),
    _setting("autotune", "autotune", "flag", "AUTOTUNE", "tune parameters that are not given, while "
                                                         "training"),
    _setting("autotune", "autotune-log-file", "text", "AUTOTUNE_LOG", "file for the results of autotuning",
        metavar="FILE", depends_on="autotune"),
    _setting("autotune", "autotune-warmup-samples", "count", "AUTOTUNE_WARMUP_SAMPLES",
        "samples to skip at the beginning",        depends_on="autotune"),
    _setting("autotune", "autotune-steps-per-sample", "count", "AUTOTUNE_STEPS_PER_SAMPLE", "steps per sample",
        depends_on="autotune"),
    _setting("autotune", "autotune-bayes-opt-max-samples", "count", "AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        "maximum number of samples", depends_on="autotune"),
    _setting("autotune", "autotune-gaussian-process-noise", "number", "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        "noise of the Gaussian process, from 0 to 1", metavar="X", most=1.0, depends_on="autotune"),
    _setting("timeline", "timeline-filename", "text", "TIMELINE", "write Horovod's timeline of rank 0 "
    "to this file",
        metavar="FILE"),
    _setting("timeline", "timeline-mark-cycles", "flag", "TIMELINE_MARK_CYCLES", "mark the cycles in the timeline",
        depends_on="timeline-filename"),
    _setting("stall_check", "stall-check", "flag", "STALL_CHECK_DISABLE", "warn of ranks that others wait for (on by "
                                                                          "default)",
        opposite=True),
    _setting("stall_check", "stall-check-warning-time-seconds", "count", "STALL_CHECK_TIME_SECONDS",
        "warn after this time",        metavar="SECONDS"),
    _setting("stall_check", "stall-check-shutdown-time-seconds", "count", "STALL_SHUTDOWN_TIME_SECONDS",
        "shut Horovod down after this time", metavar="SECONDS"),
    _setting("library_options", "mpi-threads-disable", "flag", "MPI_THREADS_DISABLE",
        "for MPI only, so no effect here"),
    _setting("library_options", "num-nccl-streams", "count", "NUM_NCCL_STREAMS", "streams of NCCL"),
    _setting("library_options", "thread-affinity", "count", "THREAD_AFFINITY",
        "the CPU of Horovod's own thread, on each node from the first worker's on", metavar="CPU"),
    _setting("library_options", "gloo-timeout-seconds", "count", "GLOO_TIMEOUT_SECONDS",
        "how long gloo waits for another worker (30)", metavar="SECONDS"),
    _setting("logging", "log-level", "choice", "LOG_LEVEL", "what Horovod logs", choices=LEVELS),
    _setting("logging", "log-with-timestamp", "flag", "LOG_HIDE_TIME", "log with timestamps",
        opposite=True),
)  # fmt: skip


def has_no_effect(setting: HorovodSetting, chosen: Mapping[str, Value]) -> bool:
    """Return whether a setting depends on another one that is not chosen or is off."""
    return bool(setting.depends_on) and not chosen.get(setting.depends_on)
