"""The one table of ``distlaunch deepspeed``'s options: those of DeepSpeed's launcher, then train's.

The former are those of DeepSpeed 0.19, and the elastic ones that it had before. Where an option of
train means the same, the row is train's with DeepSpeed's spelling; what train has beyond is taken
as well.
"""

from __future__ import annotations

from distlaunch.cli.compat.drop_in import row, same, with_trains
from distlaunch.cli.option import Option

LAUNCHERS = ("pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")

OWN: tuple[Option, ...] = (
    row(
        "--num-gpus",
        "count",
        "size",
        "Workers on each node, one per GPU; CPU workers where this machine alone takes part and "
        "has none.",
        metavar="N",
    ),
    row("--num-accelerators", "count", "size", "The same as --num-gpus.", metavar="N"),
    row(
        "--no-local-rank",
        "flag",
        "script",
        "Give the script no --local_rank=N before its own arguments.",
    ),
    row(
        "--no-ssh",
        "flag",
        "nodes",
        "A launcher is started on each node of the host file; --node-rank says which.",
    ),
    row(
        "--no-ssh-check",
        "flag",
        "nodes",
        "No effect: which nodes cannot be reached is always said.",
    ),
    row(
        "--force-multi",
        "flag",
        "nodes",
        "No effect: a host that is another machine is reached there, also if alone.",
    ),
    row(
        "--launcher",
        "text",
        "nodes",
        "slurm: the nodes of the Slurm job, by srun; all others are reached by SSH.",
        metavar="|".join(LAUNCHERS),
    ),
    row(
        "--launcher-args",
        "text",
        "nodes",
        "With --launcher slurm, options of srun.",
        metavar="OPTIONS",
    ),
    row(
        "--elastic-training",
        "flag",
        "nodes",
        "Nodes may come and go, and the job is restarted up to 100 times.",
    ),
    row(
        "--min-elastic-nodes",
        "count",
        "nodes",
        "The fewest nodes of an elastic job (1).",
        metavar="N",
    ),
    row("--max-elastic-nodes", "count", "nodes", "The most nodes of an elastic job.", metavar="N"),
    row("--bind-cores-to-rank", "flag", "workers", "Bind each worker to CPUs, as --bind cores."),
    row(
        "--bind-core-list",
        "text",
        "workers",
        "Refused: taskset -c LIST before the command does it.",
        metavar="LIST",
    ),
    row(
        "--venv-script",
        "text",
        "workers",
        "Source this in bash before the workers.",
        metavar="FILE",
    ),
    row(
        "--save-pid",
        "flag",
        "output",
        "Write our process id to /tmp/<that id>.deepspeed while the job runs.",
    ),
    row(
        "--enable-each-rank-log",
        "text",
        "output",
        "Show no output, and make the job's directory, which has each rank's, in DIR.",
        metavar="DIR",
    ),
    row(
        "--autotuning",
        "text",
        "output",
        "Refused: DeepSpeed's own launcher does it.",
        metavar="tune|run",
    ),
    row(
        "--log-level",
        "choice",
        "output",
        "From warning on none of our own lines but those.",
        choices=LOG_LEVELS,
    ),
)
"""What no option of train is."""

THEIRS: tuple[Option, ...] = (
    *OWN,
    same("module", "-m --module"),
    same("no_python"),
    same(
        "hostfile",
        "-H --hostfile",
        "The hosts, as HOST slots=N lines (/job/hostfile, if that is there).",
    ),
    same("include", "-i --include"),
    same("exclude", "-e --exclude"),
    same("num_nodes", help="The first N of the hosts."),
    same("master_addr"),
    same("master_port"),
    same("node_rank", help="With --no-ssh: which of the nodes this machine is, counted from 0."),
    same("ssh_port"),
    same("quiet", "-q --quiet"),
)
"""All of DeepSpeed's: those above, and what train has by this or another name."""

SPELLING = tuple(
    (option.name, f"--{option.name[2:].replace('-', '_')}")
    for option in THEIRS
    if "-" in option.name[2:]
)
"""How DeepSpeed writes them; dashes are taken as well."""

OPTIONS: tuple[Option, ...] = with_trains(THEIRS, "deepspeed")
