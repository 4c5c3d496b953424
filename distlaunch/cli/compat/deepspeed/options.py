"""The option table of ``distlaunch deepspeed``.

The options are those of DeepSpeed 0.19, the elastic options of earlier releases, then those of
train. An option that both have is train's row with DeepSpeed's spelling.
"""

from __future__ import annotations

from distlaunch.cli.compat.drop_in import own_option, train_option, underscored, with_train_options
from distlaunch.cli.option import Option

LAUNCHERS = ("pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")

OWN_OPTIONS: tuple[Option, ...] = (
    own_option(
        "--num-gpus",
        "count",
        "size",
        (
            "Number of workers on each node, one per GPU. On a single machine "
            "without GPUs, number of CPU workers."
        ),
        metavar="N",
    ),
    own_option("--num-accelerators", "count", "size", "The same as --num-gpus.", metavar="N"),
    own_option(
        "--no-local-rank",
        "flag",
        "script",
        "Do not add --local_rank=N to the script's arguments.",
    ),
    own_option(
        "--no-ssh",
        "flag",
        "nodes",
        (
            "Each node of the host file has a launcher that was started there. "
            "--node-rank is its rank."
        ),
    ),
    own_option(
        "--no-ssh-check",
        "flag",
        "no effect",
        "Nodes that cannot be reached are always reported.",
    ),
    own_option(
        "--force-multi",
        "flag",
        "no effect",
        "A single remote host is always reached by SSH.",
    ),
    own_option(
        "--launcher",
        "text",
        "nodes",
        ("With slurm, start the nodes of the Slurm job with srun. With any other value, use SSH."),
        metavar="|".join(LAUNCHERS),
    ),
    own_option(
        "--launcher-args",
        "text",
        "nodes",
        "Options for srun, with --launcher slurm.",
        metavar="OPTIONS",
    ),
    own_option(
        "--elastic-training",
        "flag",
        "nodes",
        "Nodes may leave and join. The job is restarted up to 100 times.",
    ),
    own_option(
        "--min-elastic-nodes",
        "count",
        "nodes",
        "Minimum number of nodes of an elastic job. Default: 1.",
        metavar="N",
    ),
    own_option(
        "--max-elastic-nodes",
        "count",
        "nodes",
        "Maximum number of nodes of an elastic job.",
        metavar="N",
    ),
    own_option(
        "--bind-cores-to-rank",
        "flag",
        "workers",
        "Bind each worker to CPUs of its own, like --bind cores.",
    ),
    own_option(
        "--bind-core-list",
        "text",
        "refused",
        "Use taskset -c LIST before the command.",
        metavar="LIST",
    ),
    own_option(
        "--venv-script",
        "text",
        "workers",
        "Source this file in bash before the workers start.",
        metavar="FILE",
    ),
    own_option(
        "--save-pid",
        "flag",
        "output",
        ("While the job runs, keep the launcher's process id in /tmp/<process id>.deepspeed."),
    ),
    own_option(
        "--enable-each-rank-log",
        "text",
        "output",
        ("Show no output. Write the job's directory, with the output of each rank, to DIR."),
        metavar="DIR",
    ),
    own_option(
        "--autotuning",
        "text",
        "refused",
        "Use DeepSpeed's own launcher.",
        metavar="tune|run",
    ),
    own_option(
        "--log-level",
        "choice",
        "output",
        ("With warning and higher levels, print only warnings and errors of distlaunch."),
        choices=LOG_LEVELS,
    ),
)

COMMAND_OPTIONS: tuple[Option, ...] = underscored(
    (
        *OWN_OPTIONS,
        train_option("module", "-m --module"),
        train_option("no_python"),
        train_option(
            "hostfile",
            "-H --hostfile",
            ("File with a line HOST slots=N for each host. Default: /job/hostfile if it exists."),
        ),
        train_option("include", "-i --include"),
        train_option("exclude", "-e --exclude"),
        train_option("num_nodes", help="Use the first N hosts."),
        train_option("master_addr"),
        train_option("master_port"),
        train_option(
            "node_rank", help="Rank of this node, with --no-ssh. The first node has rank 0."
        ),
        train_option("ssh_port"),
        train_option("quiet", "-q --quiet"),
    )
)
"""All options of DeepSpeed's launcher."""

OPTIONS: tuple[Option, ...] = with_train_options(COMMAND_OPTIONS, "deepspeed")
