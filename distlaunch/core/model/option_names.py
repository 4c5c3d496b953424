"""Name options in messages as the running command spells them.

A message names an option by a member of ``Opt``: ``f"{Opt.NUM_NODES} is missing"``. The name is
that of the command that this process runs: ``--num-nodes`` for ``train``, ``--nnodes`` for
``torchrun``. ``use_names`` sets the names before the job starts. A text gets its names when it is
made, so a constant cannot name an option; a test checks this. Agents on other nodes do not know the
names: the launcher gives the advice about options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum

from distlaunch.core.model.record import Record

_TRAINS_OWN = {"script": "SCRIPT", "opt": "-o", "rendezvous_port": "--rendezvous"}
"""Names in train that are not the field with dashes."""


class OptionNames(Record):
    """The names of options in one command. Keys are fields of ``TrainOptions``. Defaults are those
    of ``train``."""

    names: Mapping[str, str] = {}
    """Names that differ from those of ``train``."""
    with_value: Mapping[str, str] = {}
    """Options with a value, for which ``{}`` stands. By default ``--name value`` or
    ``VARIABLE=value``."""
    with_this_value: Mapping[tuple[str, str], str] = {}
    """Options with one certain value, by field and value."""
    absent: frozenset[str] = frozenset()
    """Options of ``train`` that the command lacks."""
    use_cpus: str | None = None
    """How the user gets workers on CPUs. By default, by the number of processes."""
    use_cpus_of_each: str | None = None
    """The same for a job with several nodes."""
    more_cpu_workers: str | None = None
    """How the user gets more workers on CPUs if there is no GPU. By default as in ``use_cpus``.
    Empty: no advice."""
    port_in_use: str | None = None
    """What to do if the rendezvous port is in use. By default: use another one."""

    def name(self, field: str) -> str:
        """Return the name of an option; train's name if the command lacks it."""
        if field in self.names:
            return self.names[field]
        name = _TRAINS_OWN.get(field) or f"--{field.replace('_', '-')}"
        return f"distlaunch train {name}" if field in self.absent else name

    def setting(self, field: str, value: object) -> str:
        """Return an option with a value, as the user types it: ``--name value``, or
        ``VARIABLE=value``."""
        if (text := self.with_this_value.get((field, str(value)))) is not None:
            return text
        if field in self.with_value:
            return self.with_value[field].replace("{}", str(value))
        name = self.name(field)
        is_variable = name.isupper() and name[0] != "-"
        return f"{name}={value}" if is_variable else f"{name} {value}"


TRAIN_NAMES = OptionNames()
_names = TRAIN_NAMES


def option_names() -> OptionNames:
    """Return the names of the command that this process runs."""
    return _names


def name_of(field: str) -> str:
    """Return the option whose value is in ``field``, as the command of this process spells it."""
    return _names.name(field)


@contextmanager
def use_names(names: OptionNames) -> Iterator[None]:
    """Use these names inside the context, in all threads."""
    global _names  # noqa: PLW0603 - like a locale, the names belong to the process
    before, _names = _names, names
    try:
        yield
    finally:
        _names = before


class Opt(Enum):
    """An option of ``train`` in messages. The value is its field in ``TrainOptions``.

    As text, the member is the option's name in the command that this process runs.
    """

    SCRIPT = "script"
    NO_PYTHON = "no_python"
    NUM_GPUS = "num_gpus"
    GPUS_PER_NODE = "gpus_per_node"
    NUM_PROCS = "num_procs"
    PROCS_PER_NODE = "procs_per_node"
    DEVICE = "device"
    GPUS = "gpus"
    NUM_NODES = "num_nodes"
    HOSTS = "hosts"
    HOSTFILE = "hostfile"
    DISCOVER = "discover"
    INCLUDE = "include"
    EXCLUDE = "exclude"
    SPARES = "spares"
    SPREAD = "spread"
    NODE_RANK = "node_rank"
    SOURCE = "source"
    SSH_USER = "ssh_user"
    SSH_PORT = "ssh_port"
    SSH_KEY = "ssh_key"
    SSH_CONFIG = "ssh_config"
    SSH_HOST_KEYS = "ssh_host_keys"
    SSH_FANOUT = "ssh_fanout"
    SSH_COMMAND = "ssh_command"
    REQUEUE = "requeue"
    MASTER_ADDR = "master_addr"
    MASTER_PORT = "master_port"
    INTERFACE = "interface"
    LOST_AFTER = "lost_after"
    RENDEZVOUS = "rendezvous"
    RENDEZVOUS_PORT = "rendezvous_port"
    """The option with the port of RENDEZVOUS. In ``train`` that is the same option."""
    TOKEN_FILE = "token_file"  # noqa: S105 - the name of an option
    JOB_ID = "job_id"
    BACKEND = "backend"
    OPT = "opt"
    ADDRESS = "address"
    ENV = "env"
    ENV_FILE = "env_file"
    WORKDIR = "workdir"
    PYTHON = "python"
    SETUP = "setup"
    BIND = "bind"
    ISOLATE_GPUS = "isolate_gpus"
    PRELOAD = "preload"
    MAX_RESTARTS = "max_restarts"
    MIN_UPTIME = "min_uptime"
    FAILURE_GRACE = "failure_grace"
    LINGER = "linger"
    HANG_TIMEOUT = "hang_timeout"
    HANG_ACTION = "hang_action"
    ERROR_FILE = "error_file"
    DETACH = "detach"
    LOG_DIR = "log_dir"
    LOG_MAX_SIZE = "log_max_size"
    OUTPUT = "output"
    FORMAT = "format"
    METRICS = "metrics"
    ON_EVENT = "on_event"
    GRACE = "grace"

    def __str__(self) -> str:
        return _names.name(self.value)

    def __call__(self, value: object) -> str:
        """Return the option with a value, as the user types it: ``--num-nodes 2``."""
        return _names.setting(self.value, value)

    @property
    def exists(self) -> bool:
        """Whether the command has this option, under any name."""
        return self.value not in _names.absent
