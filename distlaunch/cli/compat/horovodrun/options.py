"""The option table of ``distlaunch horovodrun``: the options of horovodrun 0.28, then those of
train.

An option that train has as well is train's row, with horovodrun's spelling in addition. All other
options of train are accepted too.
"""

from __future__ import annotations

from distlaunch.cli.compat.drop_in import row, same, with_trains
from distlaunch.cli.compat.horovodrun.settings import rows
from distlaunch.cli.option import Option

ELASTIC: tuple[Option, ...] = tuple(
    row(
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
MPI: tuple[Option, ...] = (
    row(
        "--mpi",
        "flag",
        "refused",
        "Workers are started with gloo here. mpirun starts them by MPI.",
    ),
    row(
        "--jsrun",
        "flag",
        "refused",
        "Workers are started with gloo here. mpirun starts them by MPI.",
    ),
    row(
        "--mpi-args",
        "text",
        "refused",
        "Workers are started with gloo here. mpirun starts them by MPI.",
        metavar="OPTIONS",
    ),
    row(
        "--binding-args",
        "text",
        "refused",
        "Use --bind cores or --bind numa.",
        metavar="OPTIONS",
    ),
)

OWN: tuple[Option, ...] = (
    row(
        "-np --num-proc",
        "count",
        "size",
        ("Number of workers in the whole job. Default: the number of slots of all hosts."),
        metavar="N",
    ),
    row(
        "-cb --check-build",
        "flag",
        "backend",
        "Print the features of the installed Horovod and exit.",
    ),
    row("-v --version", "flag", "backend", "Print the version of the installed Horovod and exit."),
    row("--gloo", "flag", "no effect", "Gloo is always used."),
    *MPI,
    row("--tcp", "flag", "backend", "Do not use InfiniBand for NCCL."),
    row(
        "--config-file",
        "text",
        "backend",
        "Read settings of Horovod from a YAML file.",
        metavar="FILE",
    ),
    *rows(),
    row(
        "--network-interface --network-interfaces",
        "text",
        "rendezvous",
        "Network interface that the nodes use to reach each other.",
        metavar="NAME",
        repeatable=True,
    ),
    row("--disable-cache", "flag", "no effect", "Every host is always checked."),
    row("--verbose", "flag", "output", "The same as --explain."),
    row(
        "--output-filename",
        "text",
        "output",
        (
            "Write the job's directory to DIR. For each attempt it has "
            "rank.<rank>/stdout and rank.<rank>/stderr."
        ),
        metavar="DIR",
    ),
    row(
        "-prefix-timestamp --prefix-output-with-timestamp",
        "flag",
        "refused",
        "Use --format jsonl, where every line has its time.",
    ),
    *ELASTIC,
)
"""What no option of train is."""

THEIRS: tuple[Option, ...] = (
    *OWN,
    same("hosts", "-H --hosts"),
    same("hostfile", "-hostfile --hostfile"),
    same("ssh_port", "-p --ssh-port"),
    same("ssh_key", "-i --ssh-identity-file --ssh-key"),
    same("join_timeout", "--start-timeout --join-timeout"),
)
"""All options of horovodrun: those above, and those that train has under another name."""

OPTIONS: tuple[Option, ...] = with_trains(THEIRS, "horovodrun")
