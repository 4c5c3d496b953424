"""The options of a job, typed, as the command line or the Python API fills them. Pure.

Every field that is an option on the command line has a row in ``cli/option_table.py``; a test holds
the two equal. Commands of other launchers fill the same fields, and add how the job looks from
outside (``Dialect``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record
from distlaunch.core.model.run_files import TORCHRUN, TRAIN, Layout

Bind = Literal["none", "cores", "numa"]
Device = Literal["auto", "cuda", "cpu"]
HostKeys = Literal["strict", "accept-new", "off"]
OutputFormat = Literal["rich", "plain", "jsonl"]

USE_CPUS = "--num-procs N starts N workers without GPUs"
USE_CPUS_OF_EACH = "--procs-per-node N starts N workers without GPUs on each node"
LOCAL_RANK_TOO = "LOCAL_RANK in the environment says the same"
NO_LOCAL_RANK = f"-o local-rank=off leaves it out: {LOCAL_RANK_TOO}"


class TrainOptions(Record):
    """One ``train`` (or ``plan``) command, parsed but not yet resolved. ``None`` means "not
    given"."""

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
    """Hosts that are kept ready beside those that train."""
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
    """Seconds."""
    lost_after: float = 10.0
    """Seconds of silence after which a node, and for a node the launcher, is lost."""
    rendezvous: str | None = None
    """``HOST:PORT`` of node 0's launcher, for the others to call."""
    token_file: str | None = None
    weak_token_ok: bool = False
    """A token of fewer than 16 characters is taken."""
    job_id: str | None = None
    # backend
    backend: str = "pytorch-ddp"
    opt: tuple[str, ...] = ()
    """``NAME=VALUE``, for the backend."""
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
    """Before the first restart in a row, and at most; ``None``: no delay."""
    min_uptime: float = 10.0
    grace: float = 25.0
    failure_grace: float = 5.0
    linger: float | None = None
    """After a success, for processes that workers have left; ``None``: as long as
    ``failure_grace``."""
    hang_timeout: float | None = None
    error_file: str | None = None
    hang_notice: float = 300.0
    # output
    log_dir: str | None = None
    node_logs: str | None = None
    output: str = "all"
    format: OutputFormat | None = None
    quiet: bool = False
    dry_run: bool = False

    given: Mapping[str, str] = {}
    """By field: the option or variable that set it. The Python API may leave it out."""
    whole_nodes: bool = False
    """A backend's choice: the one worker of a node has all GPUs that are there, or none if there
    are none."""
    whole_gpus: int | None = None
    """It is to have so many of them."""

    def named(self, field: str) -> str:
        """Name who set a field, for messages: the option, unless a variable did."""
        return self.given.get(field) or f"--{field.replace('_', '-')}"

    def who_set(self, *fields: str) -> str | None:
        """Name who set the first of these fields that is not as by default; None if nobody did."""
        default = type(self)._defaults  # noqa: SLF001 - a record's own table
        return next(
            (self.named(field) for field in fields if getattr(self, field) != default[field]), None
        )

    @property
    def dialect(self) -> Dialect:
        """What only another launcher's words can change."""
        return _TRAIN

    @property
    def texts(self) -> Mapping[str, str]:
        """Return what is in files that have been read before, by path: a pipe is empty the second
        time."""
        return _NO_TEXTS

    @property
    def needs_gpus(self) -> bool:
        """Return whether it matters which GPUs there are."""
        counts_processes = self.num_procs is not None or self.procs_per_node is not None
        on_cpu = self.device == "cpu" or (
            self.device == "auto" and counts_processes and not self.whole_nodes
        )
        return not on_cpu or self.gpus is not None


_NO_TEXTS: Mapping[str, str] = {}


class Dialect(Record):
    """How a job is seen from outside; as it stands, ``train``'s."""

    layout: Layout = TRAIN
    """The names of the log files."""
    run_id: str | None = None
    """What TORCHELASTIC_RUN_ID says; None: the job's id."""
    role: str = "default"
    """What ROLE_NAME says."""
    prefix_columns: int | None = None
    """How wide what stands before each line on the console is; None: as wide as a rank in
    brackets."""
    shows_bars: bool = True
    """The console shows both streams of rank 0, if it shows that rank."""
    rank_macro: str | None = None
    """What stands for the local rank in the arguments of the script."""
    takes_typed: bool = False
    """Of several workers rank 0 reads what is typed, if stdin is a terminal of which we are the
    foreground job."""
    spelling: tuple[tuple[str, str], ...] = ()
    """What ``train``'s options are called, for hints and errors: its spelling, then this dialect's;
    # is any number."""

    def spelt(self, text: str) -> str:
        """Put a text of ours, which speaks of ``train``'s options, into this dialect."""
        if not self.spelling:
            return text
        import re

        words = dict(self.spelling)
        longest_first = sorted(words, key=len, reverse=True)
        forms = [re.escape(key).replace(r"\#", "[0-9]+") for key in longest_first]

        def other(found: re.Match[str]) -> str:
            key = longest_first[(found.lastindex or 1) - 1]
            before, number, _ = key.partition("#")
            if not number:
                return words[key]
            rest = found[0][len(before) :]
            return words[key].replace("#", rest[: len(rest) - len(rest.lstrip("0123456789"))])

        return re.sub(
            rf"(?<![\w-])(?:{'|'.join(f'({form})' for form in forms)})(?![\w-])", other, text
        )


_TRAIN = Dialect()


class DropInOptions(TrainOptions):
    """One command in the words of another launcher whose meaning ``train`` has options for."""

    dialect: Dialect = _TRAIN
    texts: Mapping[str, str] = _NO_TEXTS


class TorchrunOptions(TrainOptions):
    """One ``torchrun`` command: what ``train`` has an option for is in that field, the rest is
    here.

    Workers see the devices that the launcher sees, unless ``isolate_gpus`` (or MIG) gives each its
    own.
    """

    workers: int | Literal["auto", "cpu", "gpu", "xpu"] = 1
    dialect: Dialect = Dialect(
        layout=TORCHRUN, prefix_columns=0, rank_macro="${local_rank}", takes_typed=True
    )

    @property
    def needs_gpus(self) -> bool:
        """Return whether it matters which GPUs there are: to count or share them, or to wait for
        their memory."""
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
    """Refuse options that want GPUs and CPUs at once. Raises ConfigError."""
    gpus = options.num_gpus is not None or options.gpus_per_node is not None
    if counts_processes(options) and gpus:
        raise ConfigError(
            "GPUs and CPU workers are asked for together",
            hint="give --num-gpus or --num-procs, not both",
        )
    if on_cpus(options) and counts_processes(options) and options.gpus is not None:
        raise ConfigError(
            "--gpus is given for CPU workers", hint="--device cuda lets them share these GPUs"
        )
    if options.device == "cpu" and (gpus or options.gpus is not None):
        raise ConfigError("--device cpu and a choice of GPUs contradict each other", hint=USE_CPUS)


def counts_processes(options: TrainOptions) -> bool:
    """Return whether the size is given in processes, not in GPUs."""
    return options.num_procs is not None or options.procs_per_node is not None


def on_cpus(options: TrainOptions) -> bool:
    """Return whether workers are to leave GPUs alone, whatever there is."""
    counted = counts_processes(options) and not options.whole_nodes
    return options.device == "cpu" or (counted and options.device != "cuda")


def shares_gpus(options: TrainOptions) -> bool:
    """Return whether workers are counted as processes, but use GPUs."""
    return counts_processes(options) and not on_cpus(options)


def asks_for_gpus(options: TrainOptions) -> bool:
    """Return whether there is no doing without GPUs."""
    counts = options.num_gpus is not None or options.gpus_per_node is not None
    return (
        counts
        or options.device == "cuda"
        or options.gpus is not None
        or options.whole_gpus is not None
    )


def use_cpus(*, several: bool) -> str:
    """Return the hint for those who want workers on CPUs; ``several``: over several nodes."""
    return USE_CPUS_OF_EACH if several else USE_CPUS
