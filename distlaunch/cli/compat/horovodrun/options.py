"""The option table of ``distlaunch horovodrun``.

The options are those of horovodrun 0.28, then those of train. An option that both have is train's
row with horovodrun's spelling in addition.
"""

from __future__ import annotations

from distlaunch.cli.compat.drop_in import own_option, train_option, with_train_options
from distlaunch.cli.compat.horovodrun.settings import rows
from distlaunch.cli.option import Option

ELASTIC_OPTIONS: tuple[Option, ...] = tuple(
    own_option(
        flags,
        "text",
        "refused",
        (
            "Elastic Horovod unpickles data from the network. Use --num-nodes "
            "MIN:MAX of distlaunch train."
        ),
        metavar="X",
    )
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
MPI_OPTIONS: tuple[Option, ...] = (
    own_option(
        "--mpi",
        "flag",
        "refused",
        "Workers are started with gloo here. mpirun starts them by MPI.",
    ),
    own_option(
        "--jsrun",
        "flag",
        "refused",
        "Workers are started with gloo here. mpirun starts them by MPI.",
    ),
    own_option(
        "--mpi-args",
        "text",
        "refused",
        "Workers are started with gloo here. mpirun starts them by MPI.",
        metavar="OPTIONS",
    ),
    own_option(
        "--binding-args",
        "text",
        "refused",
        "Use --bind cores or --bind numa.",
        metavar="OPTIONS",
    ),
)

OWN_OPTIONS: tuple[Option, ...] = (
    own_option(
        "-np --num-proc",
        "count",
        "size",
        ("Number of workers in the whole job. Default: the number of slots of all hosts."),
        metavar="N",
        shown="-np",
    ),
    own_option(
        "-cb --check-build",
        "flag",
        "backend",
        "Print the features of the installed Horovod and exit.",
    ),
    own_option(
        "-v --version", "flag", "backend", "Print the version of the installed Horovod and exit."
    ),
    own_option("--gloo", "flag", "no effect", "Gloo is always used."),
    *MPI_OPTIONS,
    own_option("--tcp", "flag", "backend", "Do not use InfiniBand for NCCL."),
    own_option(
        "--config-file",
        "text",
        "backend",
        "Read settings of Horovod from a YAML file.",
        metavar="FILE",
    ),
    *rows(),
    own_option(
        "--network-interface --network-interfaces",
        "text",
        "rendezvous",
        "Network interface that the nodes use to reach each other.",
        metavar="NAME",
        repeatable=True,
    ),
    own_option("--disable-cache", "flag", "no effect", "Every host is always checked."),
    own_option("--verbose", "flag", "output", "The same as --explain."),
    own_option(
        "--output-filename",
        "text",
        "output",
        (
            "Write the job's directory to DIR. For each attempt it has "
            "rank.<rank>/stdout and rank.<rank>/stderr."
        ),
        metavar="DIR",
    ),
    own_option(
        "-prefix-timestamp --prefix-output-with-timestamp",
        "flag",
        "refused",
        "Use --format jsonl, where every line has its time.",
    ),
    *ELASTIC_OPTIONS,
)

COMMAND_OPTIONS: tuple[Option, ...] = (
    *OWN_OPTIONS,
    train_option("hosts", "-H --hosts"),
    train_option("hostfile", "-hostfile --hostfile"),
    train_option("ssh_port", "-p --ssh-port"),
    train_option("ssh_key", "-i --ssh-identity-file --ssh-key"),
    train_option("join_timeout", "--start-timeout --join-timeout"),
)
"""All options of horovodrun."""

OPTIONS: tuple[Option, ...] = with_train_options(COMMAND_OPTIONS, "horovodrun")
