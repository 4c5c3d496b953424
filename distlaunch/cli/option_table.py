"""The one table of options, from which the quick parser, the typer commands and the help are made.

A row says everything about an option except its default, which is the field's own in
``TrainOptions``. A default may also come from the environment (``Option.variable``). None of those
variables is one that workers get from us, so that a launcher that is started by a worker never
takes its parent's settings for a wish of the user.
"""

from __future__ import annotations

from distlaunch.cli.option import Group, Kind, Option
from distlaunch.core.model.record import defaults_of
from distlaunch.planning.train_options import TrainOptions

GROUP_TITLES: dict[Group, str] = {
    "script": "What runs",
    "size": "Size",
    "nodes": "Nodes",
    "ssh": "SSH, to the other nodes",
    "slurm": "Slurm, where one launcher has a whole job",
    "rendezvous": "Rendezvous",
    "backend": "Backend",
    "workers": "Workers",
    "failure": "Failure (times in seconds, or as 30s, 5m, 2h)",
    "output": "Output",
    "render": "The file, and what it asks the scheduler for",
}

_DEFAULTS = defaults_of(TrainOptions)
HELP_FLAGS = ("--help", "-h")
LEAST_LOST_S = 5.0
"""Nodes are asked for a sign of life every 2 s."""
LEAST_JOIN_S = 0.1
"""In less nobody can be called."""
LEAST_SILENCE_S = 1.5
"""Signs of life are told once a second: no shorter silence can be seen."""


def _row(
    flags: str,
    kind: Kind,
    group: Group,
    help: str,  # noqa: A002 - named as the field that it fills
    *,
    field: str | None = None,
    metavar: str = "",
    choices: tuple[str, ...] = (),
    variable: str | None = "",
    repeatable: bool = False,
    least_s: float = 0.0,
) -> Option:
    """Make the row of a ``TrainOptions`` field; field and variable follow from the long flag unless
    given."""
    words = tuple(flags.split())
    stem = words[-1][2:].replace("-", "_")
    field = field or stem
    return Option(
        flags=words,
        field=field,
        kind=kind,
        default=_DEFAULTS[field],
        help=help,
        group=group,
        variable="DISTLAUNCH_" + stem.upper() if variable == "" else variable,
        metavar="|".join(choices) or metavar,
        choices=choices,
        repeatable=repeatable,
        least_s=least_s,
    )


TRAIN_OPTIONS: tuple[Option, ...] = (
    _row(
        "--script",
        "text",
        "script",
        "The training script; options go on until the first other word.",
        metavar="PATH",
        variable=None,
    ),
    _row(
        "-m --module",
        "flag",
        "script",
        "SCRIPT is the name of a module, as with python -m.",
        variable=None,
    ),
    _row(
        "--no-python",
        "flag",
        "script",
        "SCRIPT is a program of its own, not run by Python.",
        variable=None,
    ),
    _row(
        "--num-gpus",
        "count or auto",
        "size",
        "Workers in all, one per GPU; auto is every visible GPU.",
        metavar="N|auto",
    ),
    _row("--gpus-per-node", "count", "size", "Workers on each node, one per GPU.", metavar="N"),
    _row(
        "--num-procs",
        "count",
        "size",
        "CPU workers in all; GPUs are hidden unless --device cuda shares them.",
        metavar="N",
    ),
    _row("--procs-per-node", "count", "size", "CPU workers on each node.", metavar="N"),
    _row(
        "--device",
        "choice",
        "size",
        "What the workers compute on.",
        choices=("auto", "cuda", "cpu"),
    ),
    _row(
        "--gpus",
        "text",
        "size",
        "Which GPUs: indices or UUIDs, in this order.",
        metavar="0,2|UUID,...",
    ),
    _row(
        "--num-nodes",
        "count or range",
        "nodes",
        "Nodes that take part; MIN:MAX lets nodes come and go.",
        metavar="N|MIN:MAX",
    ),
    _row(
        "--hosts",
        "text",
        "nodes",
        "The hosts, and how many workers each takes.",
        metavar="a:4,n[01-04]:8,...",
    ),
    _row(
        "--hostfile",
        "text",
        "nodes",
        "The same from a file of Open MPI, Horovod, DeepSpeed, MPICH or PBS.",
        metavar="FILE",
    ),
    _row(
        "--discover",
        "text",
        "nodes",
        "The same from a command that prints HOST or HOST:SLOTS lines.",
        metavar="COMMAND",
    ),
    _row("--include", "text", "nodes", "Only these hosts, or slots of them.", metavar="w0@w1:0,2"),
    _row(
        "--exclude", "text", "nodes", "All but these hosts, or slots of them.", metavar="w0@w1:0,2"
    ),
    _row(
        "--spares",
        "whole",
        "nodes",
        "Hosts that only stand by, and take the place of lost ones.",
        metavar="N",
    ),
    _row(
        "--spread",
        "flag",
        "nodes",
        "Deal workers out to the nodes in turn, instead of filling each.",
    ),
    _row(
        "--node-rank",
        "whole",
        "nodes",
        "Which of the nodes this machine is, counted from 0.",
        metavar="N",
    ),
    _row(
        "--source",
        "text",
        "nodes",
        "Who says which nodes there are; flags reads nothing from the environment.",
        metavar="auto|flags|slurm|...",
    ),
    _row(
        "--explain", "flag", "nodes", "Say for each value where it came from, and why others lost."
    ),
    _row("--ssh-user", "text", "ssh", "Log in as this user.", metavar="NAME"),
    _row("--ssh-port", "port", "ssh", "Port of the SSH servers.", metavar="PORT"),
    _row("--ssh-key", "text", "ssh", "Private key to log in with.", metavar="FILE"),
    _row(
        "--ssh-config",
        "text",
        "ssh",
        "Read this instead of the user's and the system's ssh_config.",
        metavar="FILE",
    ),
    _row(
        "--ssh-host-keys",
        "choice",
        "ssh",
        "Which host keys are taken: known ones, also those of new hosts, or any.",
        choices=("strict", "accept-new", "off"),
    ),
    _row("--ssh-fanout", "count", "ssh", "Connections that are set up at once.", metavar="N"),
    _row(
        "--ssh-command",
        "text",
        "ssh",
        "Connect by this program instead: ssh, for what paramiko lacks (certificates, GSSAPI).",
        metavar="COMMAND",
    ),
    _row(
        "--srun-args",
        "text",
        "slurm",
        "Options of srun for the agents' step, as --srun-args='--container-image=IMAGE'.",
        metavar="OPTIONS",
    ),
    _row("--requeue", "flag", "slurm", "Ask Slurm for another turn if it has interrupted the job."),
    _row(
        "--master-addr",
        "text",
        "rendezvous",
        "Address of rank 0's node for the workers.",
        metavar="HOST",
    ),
    _row(
        "--master-port",
        "port",
        "rendezvous",
        "Port of rank 0's store; otherwise a free one is held.",
        metavar="PORT",
    ),
    _row(
        "--interface",
        "text",
        "rendezvous",
        "By which network nodes reach each other: an interface's name, or 10.1.0.0/16.",
        metavar="NAME|CIDR",
    ),
    _row(
        "--join-timeout",
        "seconds",
        "rendezvous",
        "How long nodes may take to come in (one that refuses at the start: 15 s, unless this is "
        "given).",
        metavar="SECONDS",
        least_s=LEAST_JOIN_S,
    ),
    _row(
        "--rendezvous",
        "text",
        "rendezvous",
        "Where node 0's launcher is called by the others, if each node has one.",
        metavar="HOST:PORT",
    ),
    _row(
        "--token-file",
        "text",
        "rendezvous",
        "A file with a secret that all launchers of the job have; or it is in DISTLAUNCH_TOKEN.",
        metavar="FILE",
    ),
    _row("--weak-token-ok", "flag", "rendezvous", "Take a token of fewer than 16 characters."),
    _row(
        "--lost-after",
        "seconds",
        "rendezvous",
        "After so long without a word a node is lost, and ends its workers; it waits as long for "
        "us.",
        metavar="SECONDS",
        least_s=LEAST_LOST_S,
    ),
    _row(
        "--job-id",
        "text",
        "rendezvous",
        "Name of the job and of its directory.",
        metavar="ID",
        variable="DISTLAUNCH_TRAIN_JOB_ID",
    ),
    _row(
        "--backend",
        "text",
        "backend",
        "The training framework that the workers use.",
        metavar="NAME",
        variable="DISTLAUNCH_TRAIN_BACKEND",
    ),
    _row(
        "-o --opt",
        "text",
        "backend",
        "An option of the backend, which distlaunch backends lists; may be repeated.",
        metavar="NAME=VALUE",
        repeatable=True,
    ),
    _row(
        "--address",
        "text",
        "backend",
        "The Ray cluster of --backend ray; the same as -o address=...",
        metavar="auto|local|HOST:PORT|ray://HOST:PORT",
    ),
    _row(
        "-x --env",
        "text",
        "workers",
        "Set a variable for the workers, or pass ours on; may be repeated.",
        metavar="NAME[=VALUE]",
        repeatable=True,
    ),
    _row(
        "--env-file",
        "text",
        "workers",
        "Read NAME=VALUE lines for the workers; may be repeated.",
        metavar="FILE",
        repeatable=True,
    ),
    _row(
        "--forward-env",
        "flag",
        "workers",
        "Send our environment to the other nodes, but for what belongs to a host.",
    ),
    _row("--workdir", "text", "workers", "The workers' working directory.", metavar="DIR"),
    _row("--python", "text", "workers", "The workers' Python interpreter.", metavar="PATH"),
    _row(
        "--setup",
        "text",
        "workers",
        "Run this in bash -l before the workers, for example a module load.",
        metavar="COMMAND",
    ),
    _row(
        "--bind",
        "choice",
        "workers",
        "Bind each worker to CPUs.",
        choices=("none", "cores", "numa"),
    ),
    _row("--isolate-gpus", "flag", "workers", "Each worker sees only its own GPU, as device 0."),
    _row(
        "--preload",
        "text",
        "workers",
        "Import these once, and fork workers from there at each start.",
        metavar="MODULE,...",
    ),
    _row(
        "--max-restarts", "whole", "failure", "How often the job may be started again.", metavar="N"
    ),
    _row(
        "--restart-window",
        "seconds",
        "failure",
        "Count only the restarts of this last time.",
        metavar="SECONDS",
    ),
    _row(
        "--min-uptime",
        "seconds",
        "failure",
        "A failure before this that would repeat is not retried.",
        metavar="SECONDS",
    ),
    _row(
        "--grace",
        "seconds",
        "failure",
        "Time to save and leave when told to stop.",
        metavar="SECONDS",
    ),
    _row(
        "--failure-grace",
        "seconds",
        "failure",
        "The same for the others when one worker fails.",
        metavar="SECONDS",
    ),
    _row(
        "--linger",
        "seconds",
        "failure",
        "Time for processes that workers leave when all have succeeded; else as --failure-grace.",
        metavar="SECONDS",
    ),
    _row(
        "--hang-timeout",
        "seconds",
        "failure",
        "End an attempt that shows no sign of life for so long.",
        metavar="SECONDS",
        least_s=LEAST_SILENCE_S,
    ),
    _row(
        "--error-file",
        "text",
        "failure",
        "Where to write the first failure in torch's format (TORCHELASTIC_ERROR_FILE; in a pod the "
        "termination log).",
        metavar="FILE",
    ),
    _row(
        "--hang-notice",
        "seconds",
        "failure",
        "Without --hang-timeout: say once where workers that are silent for so long stand.",
        metavar="SECONDS",
        least_s=LEAST_SILENCE_S,
    ),
    _row("--log-dir", "text", "output", "Where the job's directory is made.", metavar="DIR"),
    _row(
        "--node-logs",
        "text",
        "output",
        "File each rank's output on its node as well, in this folder there.",
        metavar="DIR",
    ),
    _row(
        "--output",
        "text",
        "output",
        "Whose output the console shows; files get all of it.",
        metavar="all|none|RANKS",
    ),
    _row(
        "--format",
        "choice",
        "output",
        "How the console shows it: rich on a terminal, else plain.",
        choices=("rich", "plain", "jsonl"),
    ),
    _row("--quiet", "flag", "output", "None of our own lines, except warnings and errors."),
    _row("--dry-run", "flag", "output", "Print the plan, start nothing.", variable=None),
)
"""Every option of ``train``."""

PLAN_OPTIONS: tuple[Option, ...] = (
    *(option for option in TRAIN_OPTIONS if option.field != "format"),
    Option(
        flags=("--format",),
        field="plan_format",
        kind="choice",
        default="table",
        help="How the plan is printed.",
        group="output",
        variable=None,
        metavar="table|json",
        choices=("table", "json"),
    ),
    Option(
        flags=("--expand",),
        field="expand",
        kind="flag",
        default=False,
        help="With json, repeat for each worker what is the same for all.",
        group="output",
        variable=None,
    ),
)
"""Every option of ``plan``: those of ``train``, with a ``--format`` of its own."""
