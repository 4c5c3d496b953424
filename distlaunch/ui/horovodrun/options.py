"""Layer ui: the one table of ``distlaunch horovodrun``'s options: those of horovodrun 0.28, then train's.

Where an option of train means the same, the row is train's with horovodrun's spelling beside it; what train has beyond
is taken as well.
"""

from __future__ import annotations

from collections.abc import Iterator

from distlaunch.core.model.record import replace
from distlaunch.ui.horovodrun.settings import LEVELS, SETTINGS, Setting
from distlaunch.ui.option import Group, Kind, Option
from distlaunch.ui.options import TRAIN_OPTIONS

_TRAIN = {option.field: option for option in TRAIN_OPTIONS}


def _same(field: str, flags: str, help: str = "") -> Option:  # noqa: A002 - named as the field that it fills
    row = _TRAIN[field]
    return replace(row, flags=tuple(flags.split()), help=help or row.help)


def _row(
    flags: str,
    kind: Kind,
    group: Group,
    help: str,  # noqa: A002 - named as the field that it fills
    *,
    metavar: str = "",
    choices: tuple[str, ...] = (),
    field: str = "",
    repeatable: bool = False,
) -> Option:
    words = tuple(flags.split())
    return Option(
        flags=words,
        field=field or words[-1][2:].replace("-", "_"),
        kind=kind,
        default=False if kind == "flag" else None,
        help=help,
        group=group,
        variable=None,
        metavar="|".join(choices) or metavar,
        choices=choices,
        repeatable=repeatable,
    )


def _rows_of(setting: Setting) -> Iterator[Option]:
    field = setting.name.replace("-", "_")
    if setting.takes == "switch":
        yield _row(" ".join(setting.flags), "flag", "backend", setting.help, field=field)
        yield _row(" ".join(setting.undone), "flag", "backend", "Not so.", field=f"no_{field}")
    else:
        choices = LEVELS if setting.takes == "level" else ()
        yield _row(f"--{setting.name}", "text", "backend", setting.help, metavar=setting.metavar, choices=choices)


ELASTIC: tuple[Option, ...] = tuple(
    _row(flags, "text", "nodes", "Refused: elastic Horovod unpickles what comes from the network.", metavar="X")
    for flags in (
        "--min-num-proc --min-np",
        "--max-num-proc --max-np",
        "--slots-per-host",
        "--elastic-timeout",
        "--reset-limit",
        "--blacklist-cooldown-range",
        "--host-discovery-script",
    )
)
MPI: tuple[Option, ...] = (
    _row("--mpi", "flag", "backend", "Refused: workers are controlled by gloo here; mpirun starts them by MPI."),
    _row("--jsrun", "flag", "backend", "Refused, as --mpi."),
    _row("--mpi-args", "text", "backend", "Refused, as --mpi.", metavar="OPTIONS"),
    _row("--binding-args", "text", "workers", "Refused: --bind cores or numa binds workers.", metavar="OPTIONS"),
)

OWN: tuple[Option, ...] = (
    _row("-np --num-proc", "count", "size", "Workers in all; by default as many as the hosts have slots.", metavar="N"),
    _row(
        "-cb --check-build",
        "flag",
        "backend",
        "Print what the Horovod of the workers' Python was built with, and exit.",
    ),
    _row("-v --version", "flag", "backend", "Print its version, and exit."),
    _row("--gloo", "flag", "backend", "No effect: it is always so."),
    *MPI,
    _row("--tcp", "flag", "backend", "NCCL does not use InfiniBand."),
    _row("--config-file", "text", "backend", "Read these settings from a YAML file.", metavar="FILE"),
    *(row for setting in SETTINGS for row in _rows_of(setting)),
    _row(
        "--network-interface --network-interfaces",
        "text",
        "rendezvous",
        "By which network nodes reach each other; one interface.",
        metavar="NAME",
        repeatable=True,
    ),
    _row("--disable-cache", "flag", "nodes", "No effect: every host is always looked at."),
    _row("--verbose", "flag", "output", "As --explain."),
    _row(
        "--output-filename",
        "text",
        "output",
        "Make the job's directory in DIR, and in it for each attempt rank.<rank>/stdout and stderr.",
        metavar="DIR",
    ),
    _row(
        "-prefix-timestamp --prefix-output-with-timestamp",
        "flag",
        "output",
        "Refused: --format jsonl gives every line its time.",
    ),
    *ELASTIC,
)
"""What no option of train is."""

SAME: tuple[Option, ...] = (
    _same("hosts", "-H --hosts"),
    _same("hostfile", "-hostfile --hostfile"),
    _same("ssh_port", "-p --ssh-port"),
    _same("ssh_key", "-i --ssh-identity-file --ssh-key"),
    _same("join_timeout", "--start-timeout --join-timeout"),
)
"""What train has by another name."""

_LEFT_OUT = {
    *("script", "module", "no_python", "num_gpus", "gpus_per_node", "num_procs", "procs_per_node", "num_nodes"),
    *("discover", "include", "exclude", "spares", "spread", "node_rank", "interface", "backend", "rendezvous"),
    *(option.field for option in SAME),
}
OPTIONS: tuple[Option, ...] = (
    *OWN,
    *SAME,
    *(option for option in TRAIN_OPTIONS if option.field not in _LEFT_OUT),
)
