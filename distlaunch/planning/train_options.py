"""The typed options of a job, set by the command line or the Python API. No I/O.

Every field that is an option of the command line has a row in ``cli/option_table.py``. The commands
that accept another launcher's options set the same fields; a ``Dialect`` has the names that differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import TRAIN_NAMES, Opt, OptionNames, name_of, option_names
from distlaunch.core.model.record import Record
from distlaunch.core.model.run_files import TORCHRUN, TRAIN, Layout

Bind = Literal["none", "cores", "numa"]
Device = Literal["auto", "cuda", "cpu"]
HostKeys = Literal["strict", "accept-new", "off"]
HangAction = Literal["stop", "restart", "report"]
OutputFormat = Literal["rich", "plain", "jsonl"]

LOCAL_RANK_TOO = "LOCAL_RANK in the environment says the same"


class TrainOptions(Record):
    """The options of one ``train`` or ``plan`` command, not yet checked against the machine. None:
    not set."""

    # what runs
    script: str | None = None
    script_args: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    # size
    num_gpus: int | Literal["auto"] | None = None
    gpus_per_node: int | None = None
    num_procs: int | None = None
    procs_per_node: int | None = None
    device: Device = "auto"
    gpus: str | None = None
    # nodes
    num_nodes: int | tuple[int, int] | None = None
    """``(2, 4)``: smallest and largest number of an elastic job."""
    hosts: str | None = None
    hostfile: str | None = None
    discover: str | None = None
    include: str | None = None
    exclude: str | None = None
    spares: int = 0
    """Number of hosts in reserve."""
    spread: bool = False
    node_rank: int | None = None
    source: str = "auto"
    explain: bool = False
    # ssh
    ssh_user: str | None = None
    ssh_port: int | None = None
    ssh_key: str | None = None
    ssh_config: str | None = None
    ssh_host_keys: HostKeys = "strict"
    ssh_fanout: int = 64
    ssh_command: str | None = None
    # slurm
    srun_args: str | None = None
    requeue: bool = False
    # rendezvous
    master_addr: str | None = None
    master_port: int | None = None
    interface: str | None = None
    join_timeout: float = 60.0
    """In seconds."""
    lost_after: float = 10.0
    """Seconds of silence after which a node is lost, and for a node its launcher."""
    rendezvous: str | None = None
    """``HOST:PORT`` of node 0's launcher, to which the others connect."""
    token_file: str | None = None
    weak_token_ok: bool = False
    """Accept a token of fewer than 16 characters."""
    job_id: str | None = None
    # backend
    backend: str = "pytorch-ddp"
    opt: tuple[str, ...] = ()
    """``NAME=VALUE`` for the backend."""
    address: str | None = None
    """The backend's option of this name."""
    # workers
    env: tuple[str, ...] = ()
    env_file: tuple[str, ...] = ()
    forward_env: bool = True
    workdir: str | None = None
    python: str | None = None
    setup: str | None = None
    bind: Bind = "none"
    isolate_gpus: bool = False
    preload: str | None = None
    # failure; all in seconds
    max_restarts: int = 0
    restart_window: float | None = None
    restart_delay: tuple[float, float] | None = None
    """Delay before the first restart of a series, and its upper limit."""
    min_uptime: float = 10.0
    grace: float = 25.0
    failure_grace: float = 5.0
    linger: float | None = None
    """How long processes that workers left may run after a success; ``None``: ``failure_grace``."""
    hang_timeout: float | None = None
    hang_action: HangAction = "stop"
    error_file: str | None = None
    hang_notice: float = 300.0
    on_event: str | None = None
    """Command that is run for important events of the job."""
    # output
    metrics: str | None = None
    """``[ADDRESS:]PORT`` at which the metrics are served."""
    log_dir: str | None = None
    node_logs: str | None = None
    log_max_size: int | None = None
    """In bytes; None: no limit."""
    output: str = "all"
    format: OutputFormat | None = None
    quiet: bool = False
    detach: bool = False
    """Go on in the background when all workers have started."""
    dry_run: bool = False

    given: Mapping[str, str] = {}
    """By field: the option or variable that set it. May be empty with the Python API."""
    whole_nodes: bool = False
    """Set by a backend: a node has one worker, which uses all of its GPUs, or none."""
    whole_gpus: int | None = None
    """How many GPUs that worker must have; ``None``: any number."""

    def named(self, field: str) -> str:
        """Return what set a field, for messages: the variable, or else the option."""
        return self.given.get(field) or name_of(field)

    def who_set(self, *fields: str) -> str | None:
        """Return the option or variable of the first of these fields whose value is not the
        default; None if all are."""
        default = type(self)._defaults  # noqa: SLF001 - a record's own table
        return next(
            (self.named(field) for field in fields if getattr(self, field) != default[field]), None
        )

    @property
    def dialect(self) -> Dialect:
        """Names and settings of the launcher whose command line was used."""
        return _TRAIN

    @property
    def texts(self) -> Mapping[str, str]:
        """Contents of files that were already read, by path. A pipe cannot be read again."""
        return _NO_TEXTS

    @property
    def needs_gpus(self) -> bool:
        """Whether the plan depends on the GPUs of the nodes."""
        counts_processes = self.num_procs is not None or self.procs_per_node is not None
        on_cpu = self.device == "cpu" or (
            self.device == "auto" and counts_processes and not self.whole_nodes
        )
        return not on_cpu or self.gpus is not None


_NO_TEXTS: Mapping[str, str] = {}


class Dialect(Record):
    """Names and settings that differ between ``train`` (the defaults) and another launcher's
    command."""

    layout: Layout = TRAIN
    """Names of the log files."""
    run_id: str | None = None
    """Value of TORCHELASTIC_RUN_ID. None: the id of the job."""
    role: str = "default"
    """Value of ROLE_NAME."""
    prefix_columns: int | None = None
    """Width of the prefix of console lines. None: that of a rank in brackets."""
    shows_bars: bool = True
    """Whether the console shows both streams of rank 0 if it shows rank 0."""
    rank_macro: str | None = None
    """Placeholder in the script's arguments for the local rank."""
    takes_typed: bool = False
    """Whether rank 0 of several workers reads the terminal, if the launcher is its foreground
    job."""
    names: OptionNames = TRAIN_NAMES
    """Names of the options in messages."""

    @property
    def is_drop_in(self) -> bool:
        """Whether the command accepts another launcher's options."""
        return self.names is not TRAIN_NAMES


_TRAIN = Dialect()


class DropInOptions(TrainOptions):
    """The options of another launcher's command that ``train`` has, too."""

    dialect: Dialect = _TRAIN
    texts: Mapping[str, str] = _NO_TEXTS


class TorchrunOptions(TrainOptions):
    """The options of a ``torchrun`` command: the options of ``train``, and the number of workers.

    Workers see the launcher's devices, unless ``isolate_gpus`` or MIG gives each one device.
    """

    workers: int | Literal["auto", "cpu", "gpu", "xpu"] = 1
    dialect: Dialect = Dialect(
        layout=TORCHRUN, prefix_columns=0, rank_macro="${local_rank}", takes_typed=True
    )

    @property
    def needs_gpus(self) -> bool:
        """Whether the plan depends on this machine's GPUs: they are counted or shared, or a restart
        waits until their memory is free."""
        counted = self.workers in ("auto", "gpu")
        return (
            counted
            or self.gpus is not None
            or self.isolate_gpus
            or self.bind != "none"
            or self.max_restarts > 0
        )


# --- what sizes mean


def check_kind(options: TrainOptions) -> None:
    """Raise ConfigError for options that ask for workers on GPUs and on CPUs, or choose GPUs for
    CPU workers."""
    gpus = options.num_gpus is not None or options.gpus_per_node is not None
    if counts_processes(options) and gpus:
        raise ConfigError(
            "GPUs and CPU workers are both requested",
            hint=f"use {Opt.NUM_GPUS} or {Opt.NUM_PROCS}, not both",
        )
    if on_cpus(options) and counts_processes(options) and options.gpus is not None:
        raise ConfigError(
            f"{Opt.GPUS} is given for CPU workers",
            hint=f"{Opt.DEVICE('cuda')} lets them share these GPUs",
        )
    if options.device == "cpu" and (gpus or options.gpus is not None):
        raise ConfigError(
            f"{Opt.DEVICE('cpu')} and a choice of GPUs contradict each other",
            hint=use_cpus(several=False),
        )


def check_hang_action(options: TrainOptions) -> None:
    """Raise ConfigError for an action on hangs that would never be taken."""
    if options.hang_action == "stop":
        return
    name = Opt.HANG_ACTION(options.hang_action)
    if options.hang_timeout is None:
        raise ConfigError(
            f"{name}: hangs are not looked for", hint=f"{Opt.HANG_TIMEOUT('10m')} looks for them"
        )
    if options.hang_action == "restart" and options.max_restarts == 0:
        raise ConfigError(
            f"{name}: no restarts are allowed", hint=f"{Opt.MAX_RESTARTS(3)} allows up to three"
        )


def counts_processes(options: TrainOptions) -> bool:
    """Return whether the size is a number of processes and not of GPUs."""
    return options.num_procs is not None or options.procs_per_node is not None


def on_cpus(options: TrainOptions) -> bool:
    """Return whether workers use no GPU, even if the nodes have GPUs."""
    counted = counts_processes(options) and not options.whole_nodes
    return options.device == "cpu" or (counted and options.device != "cuda")


def shares_gpus(options: TrainOptions) -> bool:
    """Return whether the size is a number of processes that use GPUs."""
    return counts_processes(options) and not on_cpus(options)


def asks_for_gpus(options: TrainOptions) -> bool:
    """Return whether a machine without GPUs is an error."""
    counts = options.num_gpus is not None or options.gpus_per_node is not None
    return (
        counts
        or options.device == "cuda"
        or options.gpus is not None
        or options.whole_gpus is not None
    )


def use_cpus(*, several: bool) -> str:
    """Return the hint on how to get workers on CPUs. ``several``: the job has several nodes."""
    names = option_names()
    if several:
        return (
            names.use_cpus_of_each
            or f"{Opt.PROCS_PER_NODE('N')} starts N workers without GPUs on each node"
        )
    return names.use_cpus or f"{Opt.NUM_PROCS('N')} starts N workers without GPUs"


def advice_on_cpu_workers(*, several: bool) -> str:
    """Return what follows a notice that workers run on CPUs for want of GPUs. May be empty."""
    text = option_names().more_cpu_workers
    if text is None:
        return f"; {use_cpus(several=several)}"
    return text and f"; {text}" + (" on each node" if several else "")
