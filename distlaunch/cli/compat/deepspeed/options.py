"""The option table of ``distlaunch deepspeed``: DeepSpeed's options, then those of train.

DeepSpeed's options are those of release 0.19, and the elastic options of earlier releases. An
option that train has as well is train's row with DeepSpeed's spelling. All other options of train
are accepted too.
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
        (
            "Number of workers on each node, one per GPU. On a single machine "
            "without GPUs, number of CPU workers."
        ),
        metavar="N",
    ),
    row("--num-accelerators", "count", "size", "The same as --num-gpus.", metavar="N"),
    row(
        "--no-local-rank",
        "flag",
        "script",
        "Do not add --local_rank=N to the script's arguments.",
    ),
    row(
        "--no-ssh",
        "flag",
        "nodes",
        (
            "Each node of the host file has a launcher that was started there. "
            "--node-rank is its rank."
        ),
    ),
    row(
        "--no-ssh-check",
        "flag",
        "no effect",
        "Nodes that cannot be reached are always reported.",
    ),
    row(
        "--force-multi",
        "flag",
        "no effect",
        "A single remote host is always reached by SSH.",
    ),
    row(
        "--launcher",
        "text",
        "nodes",
        ("With slurm, start the nodes of the Slurm job with srun. With any other value, use SSH."),
        metavar="|".join(LAUNCHERS),
    ),
    row(
        "--launcher-args",
        "text",
        "nodes",
        "Options for srun, with --launcher slurm.",
        metavar="OPTIONS",
    ),
    row(
        "--elastic-training",
        "flag",
        "nodes",
        "Nodes may leave and join. The job is restarted up to 100 times.",
    ),
    row(
        "--min-elastic-nodes",
        "count",
        "nodes",
        "Minimum number of nodes of an elastic job. Default: 1.",
        metavar="N",
    ),
    row(
        "--max-elastic-nodes",
        "count",
        "nodes",
        "Maximum number of nodes of an elastic job.",
        metavar="N",
    ),
    row(
        "--bind-cores-to-rank",
        "flag",
        "workers",
        "Bind each worker to CPUs of its own, like --bind cores.",
    ),
    row(
        "--bind-core-list",
        "text",
        "refused",
        "Use taskset -c LIST before the command.",
        metavar="LIST",
    ),
    row(
        "--venv-script",
        "text",
        "workers",
        "Source this file in bash before the workers start.",
        metavar="FILE",
    ),
    row(
        "--save-pid",
        "flag",
        "output",
        ("While the job runs, keep the launcher's process id in /tmp/<process id>.deepspeed."),
    ),
    row(
        "--enable-each-rank-log",
        "text",
        "output",
        ("Show no output. Write the job's directory, with the output of each rank, to DIR."),
        metavar="DIR",
    ),
    row(
        "--autotuning",
        "text",
        "refused",
        "Use DeepSpeed's own launcher.",
        metavar="tune|run",
    ),
    row(
        "--log-level",
        "choice",
        "output",
        ("With warning and higher levels, print only warnings and errors of distlaunch."),
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
        ("File with a line HOST slots=N for each host. Default: /job/hostfile if it exists."),
    ),
    same("include", "-i --include"),
    same("exclude", "-e --exclude"),
    same("num_nodes", help="Use the first N hosts."),
    same("master_addr"),
    same("master_port"),
    same("node_rank", help="Rank of this node, with --no-ssh. The first node has rank 0."),
    same("ssh_port"),
    same("quiet", "-q --quiet"),
)
"""All options of DeepSpeed's launcher: those above, and those that train has under the same or
another name."""

SPELLING = tuple(
    (option.name, f"--{option.name[2:].replace('-', '_')}")
    for option in THEIRS
    if "-" in option.name[2:]
)
"""DeepSpeed's spelling of options in messages, with underscores. Dashes are accepted too."""

OPTIONS: tuple[Option, ...] = with_trains(THEIRS, "deepspeed")
