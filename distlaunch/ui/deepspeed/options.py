"""Layer ui: the one table of ``distlaunch deepspeed``'s options: those of DeepSpeed's launcher, then train's.

The former are those of DeepSpeed 0.19, and the elastic ones that it had before. Where an option of train means the
same, the row is train's with DeepSpeed's spelling; what train has beyond is taken as well.
"""

from __future__ import annotations

from distlaunch.core.model.record import replace
from distlaunch.ui.option import Group, Kind, Option
from distlaunch.ui.options import TRAIN_OPTIONS

LAUNCHERS = ("pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
_TRAIN = {option.field: option for option in TRAIN_OPTIONS}


def _same(field: str, flags: str = "", help: str = "") -> Option:  # noqa: A002 - named as the field that it fills
    row = _TRAIN[field]
    return replace(row, flags=tuple(flags.split()) or row.flags, help=help or row.help)


def _row(
    flags: str,
    kind: Kind,
    group: Group,
    help: str,  # noqa: A002 - named as the field that it fills
    *,
    metavar: str = "",
    choices: tuple[str, ...] = (),
) -> Option:
    words = tuple(flags.split())
    return Option(
        flags=words,
        field=words[-1][2:].replace("-", "_"),
        kind=kind,
        default=False if kind == "flag" else None,
        help=help,
        group=group,
        variable=None,
        metavar="|".join(choices) or metavar,
        choices=choices,
    )


OWN: tuple[Option, ...] = (
    _row(
        "--num-accelerators --num-gpus",
        "count",
        "size",
        "Workers on each node, one per GPU; CPU workers where this machine alone takes part and has none.",
        metavar="N",
    ),
    _row("--no-local-rank", "flag", "script", "Give the script no --local_rank=N before its own arguments."),
    _row("--no-ssh", "flag", "nodes", "A launcher is started on each node of the host file; --node-rank says which."),
    _row("--no-ssh-check", "flag", "nodes", "No effect: which nodes cannot be reached is always said."),
    _row(
        "--force-multi", "flag", "nodes", "No effect: a host that is another machine is reached there, also if alone."
    ),
    _row(
        "--launcher",
        "text",
        "nodes",
        "slurm: the nodes of the Slurm job, by srun; all others are reached by SSH.",
        metavar="|".join(LAUNCHERS),
    ),
    _row("--launcher-args", "text", "nodes", "With --launcher slurm, options of srun.", metavar="OPTIONS"),
    _row("--elastic-training", "flag", "nodes", "Nodes may come and go, and the job is restarted up to 100 times."),
    _row("--min-elastic-nodes", "count", "nodes", "The fewest nodes of an elastic job (1).", metavar="N"),
    _row("--max-elastic-nodes", "count", "nodes", "The most nodes of an elastic job.", metavar="N"),
    _row("--bind-cores-to-rank", "flag", "workers", "Bind each worker to CPUs, as --bind cores."),
    _row("--bind-core-list", "text", "workers", "Refused: taskset -c LIST before the command does it.", metavar="LIST"),
    _row("--venv-script", "text", "workers", "Source this in bash before the workers.", metavar="FILE"),
    _row("--save-pid", "flag", "output", "Write our process id to /tmp/<that id>.deepspeed while the job runs."),
    _row(
        "--enable-each-rank-log",
        "text",
        "output",
        "Show no output, and make the job's directory, which has each rank's, in DIR.",
        metavar="DIR",
    ),
    _row("--autotuning", "text", "output", "Refused: DeepSpeed's own launcher does it.", metavar="tune|run"),
    _row("--log-level", "choice", "output", "From warning on none of our own lines but those.", choices=LOG_LEVELS),
)
"""What no option of train is."""

_SAME: tuple[Option, ...] = (
    _same("module", "-m --module"),
    _same("no_python"),
    _same("hostfile", "-H --hostfile", "The hosts, as HOST slots=N lines (/job/hostfile, if that is there)."),
    _same("include", "-i --include"),
    _same("exclude", "-e --exclude"),
    _same("num_nodes", help="The first N of the hosts."),
    _same("master_addr"),
    _same("master_port"),
    _same("node_rank", help="With --no-ssh: which of the nodes this machine is, counted from 0."),
    _same("ssh_port"),
    _same("quiet", "-q --quiet"),
)

_LEFT_OUT = {"script", "num_gpus", "backend", *(option.field for option in _SAME)}
OPTIONS: tuple[Option, ...] = (
    *OWN,
    *_SAME,
    *(option for option in TRAIN_OPTIONS if option.field not in _LEFT_OUT),
)
