"""The one table of ``distlaunch horovodrun``'s options: those of horovodrun 0.28, then train's.

Where an option of train means the same, the row is train's with horovodrun's spelling beside it;
what train has beyond is taken as well.
"""

from __future__ import annotations

from distlaunch.cli.compat.drop_in import row, same, with_trains
from distlaunch.cli.compat.horovodrun.settings import rows
from distlaunch.cli.option import Option

ELASTIC: tuple[Option, ...] = tuple(
    row(
        flags,
        "text",
        "nodes",
        "Refused: elastic Horovod unpickles what comes from the network.",
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
        "backend",
        "Refused: workers are controlled by gloo here; mpirun starts them by MPI.",
    ),
    row("--jsrun", "flag", "backend", "Refused, as --mpi."),
    row("--mpi-args", "text", "backend", "Refused, as --mpi.", metavar="OPTIONS"),
    row(
        "--binding-args",
        "text",
        "workers",
        "Refused: --bind cores or numa binds workers.",
        metavar="OPTIONS",
    ),
)

OWN: tuple[Option, ...] = (
    row(
        "-np --num-proc",
        "count",
        "size",
        "Workers in all; by default as many as the hosts have slots.",
        metavar="N",
    ),
    row(
        "-cb --check-build",
        "flag",
        "backend",
        "Print what the Horovod of the workers' Python was built with, and exit.",
    ),
    row("-v --version", "flag", "backend", "Print its version, and exit."),
    row("--gloo", "flag", "backend", "No effect: it is always so."),
    *MPI,
    row("--tcp", "flag", "backend", "NCCL does not use InfiniBand."),
    row(
        "--config-file", "text", "backend", "Read these settings from a YAML file.", metavar="FILE"
    ),
    *rows(),
    row(
        "--network-interface --network-interfaces",
        "text",
        "rendezvous",
        "By which network nodes reach each other; one interface.",
        metavar="NAME",
        repeatable=True,
    ),
    row("--disable-cache", "flag", "nodes", "No effect: every host is always looked at."),
    row("--verbose", "flag", "output", "As --explain."),
    row(
        "--output-filename",
        "text",
        "output",
        "Make the job's directory in DIR, and in it for each attempt rank.<rank>/stdout and "
        "stderr.",
        metavar="DIR",
    ),
    row(
        "-prefix-timestamp --prefix-output-with-timestamp",
        "flag",
        "output",
        "Refused: --format jsonl gives every line its time.",
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
"""All of horovodrun's: those above, and what train has by another name."""

OPTIONS: tuple[Option, ...] = with_trains(THEIRS, "horovodrun")
