"""The one table of options, from which the parser, the completion and the help are made.

A row says everything about an option except its default, which is the field's own in
``TrainOptions``. A default may also come from the environment (``Option.variable``). None of those
variables is one that workers get from us, so that a launcher that is started by a worker never
takes its parent's settings for a wish of the user.

``absent`` names the places where an option does not apply, each with the reason. Everywhere else
``render`` puts the option into the file's command line, and the commands of other launchers take
it: ``torchrun`` as a variable, the others as an option.
"""

from __future__ import annotations

from collections.abc import Mapping

from distlaunch.cli.option import Absence, Group, Kind, Option, Place
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
    once: bool = False,
    least_s: float = 0.0,
    absent: Mapping[Place, Absence] | None = None,
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
        once=once,
        least_s=least_s,
        absent=absent or {},
    )


_PODS: tuple[Place, ...] = ("kubernetes", "pytorchjob", "trainjob")
_RENDERED: tuple[Place, ...] = ("slurm", *_PODS)
_DROP_INS: tuple[Place, ...] = ("torchrun", "accelerate", "deepspeed", "horovodrun")


def _not_in(*places: Place, why: str, hint: str = "", instead: str = "") -> dict[Place, Absence]:
    """Return the reason for which an option does not apply in these places."""
    return dict.fromkeys(places, Absence(why=why, hint=hint, instead=instead))


def _of_torchrun(name: str) -> dict[Place, Absence]:
    """Return torchrun's own option, or variable, which counts there instead of train's."""
    return _not_in("torchrun", why="torchrun has an option or a variable of its own", instead=name)


_AFTER_OPTIONS = _not_in(*_DROP_INS, why="the script stands after the options")
_COMMAND = _not_in("horovodrun", why="the command that follows the options says it")
_NUM_PROCESSES = "Accelerate has an option for the workers of all machines"
_SLOTS = _not_in("horovodrun", why="the hosts and their slots say it")
_SIZE = _of_torchrun("--nproc-per-node") | _SLOTS
_TOTAL = _of_torchrun("--nproc-per-node") | _not_in(
    "horovodrun", why="-np is the number of workers", instead="-np"
)
_CPU_SIZE = _not_in("accelerate", why=_NUM_PROCESSES, instead="--cpu --num_processes")
_OWN_LAUNCHERS = _not_in(
    "torchrun", why="each node has a launcher that a user or a scheduler starts"
)
_HOSTS = _OWN_LAUNCHERS | _not_in(
    *_RENDERED, why="the scheduler chooses the hosts", hint="--num-nodes N says how many"
)
_CHOSEN = _OWN_LAUNCHERS | _not_in(
    *_PODS,
    why="Kubernetes chooses the nodes",
    hint="add a nodeSelector or an affinity to the manifest",
)
_SSH = _OWN_LAUNCHERS | _not_in(*_RENDERED, why="nothing goes by SSH there")
_BY_SRUN = _OWN_LAUNCHERS | _not_in(*_PODS, why="there is no Slurm")
_FIRST_POD = _not_in(*_PODS, why="it is the name of the first pod")
_FOR_PYTORCH = "torchrun starts scripts of PyTorch alone"
_FOR_TORCH = _not_in("torchrun", why=_FOR_PYTORCH)
_ONE_BACKEND = _not_in(
    "accelerate", "deepspeed", "horovodrun", why="the command has one backend, its own"
)

TRAIN_OPTIONS: tuple[Option, ...] = (
    _row(
        "--script",
        "text",
        "script",
        "The training script; options go on until the first other word.",
        metavar="PATH",
        variable=None,
        absent=_AFTER_OPTIONS,
    ),
    _row(
        "-m --module",
        "flag",
        "script",
        "SCRIPT is the name of a module, as with python -m.",
        variable=None,
        absent=_of_torchrun("--module") | _COMMAND,
    ),
    _row(
        "--no-python",
        "flag",
        "script",
        "SCRIPT is a program of its own, not run by Python.",
        variable=None,
        absent=_of_torchrun("--no-python") | _COMMAND,
    ),
    _row(
        "--num-gpus",
        "count or auto",
        "size",
        "Workers in all, one per GPU; auto is every visible GPU.",
        metavar="N|auto",
        absent=_TOTAL
        | _not_in("accelerate", why=_NUM_PROCESSES, instead="--num_processes")
        | _not_in("deepspeed", why="--num_gpus is the number on each node"),
    ),
    _row(
        "--gpus-per-node",
        "count",
        "size",
        "Workers on each node, one per GPU.",
        metavar="N",
        absent=_SIZE | _not_in("accelerate", why=_NUM_PROCESSES, instead="--num_processes"),
    ),
    _row(
        "--num-procs",
        "count",
        "size",
        "CPU workers in all; GPUs are hidden unless --device cuda shares them.",
        metavar="N",
        absent=_TOTAL | _CPU_SIZE,
    ),
    _row(
        "--procs-per-node",
        "count",
        "size",
        "CPU workers on each node.",
        metavar="N",
        absent=_SIZE | _CPU_SIZE,
    ),
    _row(
        "--device",
        "choice",
        "size",
        "What the workers compute on.",
        choices=("auto", "cuda", "cpu"),
        absent=_of_torchrun("CUDA_VISIBLE_DEVICES")
        | _not_in("accelerate", why="--cpu chooses the CPU, the configuration a GPU"),
    ),
    _row(
        "--gpus",
        "text",
        "size",
        "Which GPUs: indices or UUIDs, in this order.",
        metavar="0,2|UUID,...",
        absent=_not_in(
            *_RENDERED,
            why="which GPUs a node gives to the job is the scheduler's choice",
            hint="--gpus-per-node N says how many",
        ),
    ),
    _row(
        "--num-nodes",
        "count or range",
        "nodes",
        "Nodes that take part; MIN:MAX lets nodes come and go.",
        metavar="N|MIN:MAX",
        absent=_of_torchrun("--nnodes")
        | _not_in("accelerate", why="Accelerate has an option of its own", instead="--num_machines")
        | _SLOTS,
    ),
    _row(
        "--hosts",
        "text",
        "nodes",
        "The hosts, and how many workers each takes.",
        metavar="a:4,n[01-04]:8,...",
        once=True,
        absent=_HOSTS,
    ),
    _row(
        "--hostfile",
        "text",
        "nodes",
        "The same from a file of Open MPI, Horovod, DeepSpeed, MPICH or PBS.",
        metavar="FILE",
        once=True,
        absent=_HOSTS,
    ),
    _row(
        "--discover",
        "text",
        "nodes",
        "The same from a command that prints HOST or HOST:SLOTS lines.",
        metavar="COMMAND",
        once=True,
        absent=_HOSTS | _SLOTS,
    ),
    _row(
        "--include",
        "text",
        "nodes",
        "Only these hosts, or slots of them.",
        metavar="w0@w1:0,2",
        absent=_CHOSEN | _SLOTS,
    ),
    _row(
        "--exclude",
        "text",
        "nodes",
        "All but these hosts, or slots of them.",
        metavar="w0@w1:0,2",
        absent=_CHOSEN | _SLOTS,
    ),
    _row(
        "--spares",
        "whole",
        "nodes",
        "Hosts that only stand by, and take the place of lost ones.",
        metavar="N",
        absent=_not_in(
            *_PODS,
            why="Kubernetes starts another pod for one that is lost",
            hint="--num-nodes MIN:MAX goes on with fewer meanwhile",
        )
        | _OWN_LAUNCHERS
        | _SLOTS,
    ),
    _row(
        "--spread",
        "flag",
        "nodes",
        "Deal workers out to the nodes in turn, instead of filling each.",
        absent=_OWN_LAUNCHERS | _SLOTS,
    ),
    _row(
        "--node-rank",
        "whole",
        "nodes",
        "Which of the nodes this machine is, counted from 0.",
        metavar="N",
        absent=_not_in(*_RENDERED, why="each node finds out by itself which it is")
        | _of_torchrun("--node-rank")
        | _not_in("accelerate", why="Accelerate has an option of its own", instead="--machine_rank")
        | _SLOTS,
    ),
    _row(
        "--source",
        "text",
        "nodes",
        "Who says which nodes there are; flags reads nothing from the environment.",
        metavar="auto|flags|slurm|...",
        absent=_OWN_LAUNCHERS,
    ),
    _row(
        "--explain",
        "flag",
        "nodes",
        "Say for each value where it came from, and why others lost.",
        absent=_not_in("torchrun", why="sizes are those of the command line"),
    ),
    _row(
        "--ssh-user",
        "text",
        "ssh",
        "Log in as this user.",
        metavar="NAME",
        absent=_SSH,
    ),
    _row(
        "--ssh-port",
        "port",
        "ssh",
        "Port of the SSH servers.",
        metavar="PORT",
        absent=_SSH,
    ),
    _row(
        "--ssh-key",
        "text",
        "ssh",
        "Private key to log in with.",
        metavar="FILE",
        absent=_SSH,
    ),
    _row(
        "--ssh-config",
        "text",
        "ssh",
        "Read this instead of the user's and the system's ssh_config.",
        metavar="FILE",
        absent=_SSH,
    ),
    _row(
        "--ssh-host-keys",
        "choice",
        "ssh",
        "Which host keys are taken: known ones, also those of new hosts, or any.",
        choices=("strict", "accept-new", "off"),
        absent=_SSH,
    ),
    _row(
        "--ssh-fanout",
        "count",
        "ssh",
        "Connections that are set up at once.",
        metavar="N",
        absent=_SSH,
    ),
    _row(
        "--ssh-command",
        "text",
        "ssh",
        "Connect by this program instead: ssh, for what paramiko lacks (certificates, GSSAPI).",
        metavar="COMMAND",
        absent=_SSH,
    ),
    _row(
        "--srun-args",
        "text",
        "slurm",
        "Options of srun for the agents' step, as --srun-args='--container-image=IMAGE'.",
        metavar="OPTIONS",
        absent=_BY_SRUN,
    ),
    _row(
        "--requeue",
        "flag",
        "slurm",
        "Ask Slurm for another turn if it has interrupted the job, its time limit included.",
        absent=_BY_SRUN,
    ),
    _row(
        "--master-addr",
        "text",
        "rendezvous",
        "Address of rank 0's node for the workers.",
        metavar="HOST",
        absent=_FIRST_POD
        | _of_torchrun("--master-addr")
        | _not_in("accelerate", why="it is where the machines meet", instead="--main_process_ip"),
    ),
    _row(
        "--master-port",
        "port",
        "rendezvous",
        "Port of rank 0's store; otherwise a free one is held.",
        metavar="PORT",
        absent=_of_torchrun("--master-port")
        | _not_in("accelerate", why="it is where the machines meet", instead="--main_process_port"),
    ),
    _row(
        "--interface",
        "text",
        "rendezvous",
        "By which network nodes reach each other: an interface's name, or 10.1.0.0/16.",
        metavar="NAME|CIDR",
        absent=_not_in(
            "horovodrun", why="horovodrun has an option of its own", instead="--network-interface"
        ),
    ),
    _row(
        "--join-timeout",
        "seconds",
        "rendezvous",
        "How long nodes may take to come in (one that refuses at the start: 15 s, unless this is "
        "given).",
        metavar="SECONDS",
        least_s=LEAST_JOIN_S,
        absent=_of_torchrun("--rdzv-conf join_timeout"),
    ),
    _row(
        "--rendezvous",
        "text",
        "rendezvous",
        "Where node 0's launcher is called by the others, if each node has one.",
        metavar="HOST:PORT",
        absent=_FIRST_POD
        | _of_torchrun("--rdzv-endpoint")
        | _not_in(
            "accelerate", why="Accelerate has options of its own", instead="--main_process_ip"
        )
        | _not_in("horovodrun", why="one launcher starts the workers of all hosts"),
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
        absent=_not_in("torchrun", why="torchrun has no such option"),
    ),
    _row(
        "--job-id",
        "text",
        "rendezvous",
        "Name of the job and of its directory.",
        metavar="ID",
        variable="DISTLAUNCH_TRAIN_JOB_ID",
        absent=_of_torchrun("--rdzv-id"),
    ),
    _row(
        "--backend",
        "backend",
        "backend",
        "The training framework that the workers use.",
        metavar="NAME",
        variable="DISTLAUNCH_TRAIN_BACKEND",
        absent=_ONE_BACKEND
        | _not_in(
            "torchrun",
            why=_FOR_PYTORCH,
            hint="that is train's: distlaunch train --backend NAME [OPTIONS] SCRIPT [ARGS]...",
        ),
    ),
    _row(
        "-o --opt",
        "text",
        "backend",
        "An option of the backend, which distlaunch backends lists; may be repeated.",
        metavar="NAME=VALUE",
        repeatable=True,
        absent=_FOR_TORCH,
    ),
    _row(
        "--address",
        "text",
        "backend",
        "The Ray cluster of --backend ray; the same as -o address=...",
        metavar="auto|local|HOST:PORT|ray://HOST:PORT",
        absent=_ONE_BACKEND | _FOR_TORCH,
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
        absent=_OWN_LAUNCHERS,
    ),
    _row("--workdir", "text", "workers", "The workers' working directory.", metavar="DIR"),
    _row(
        "--python",
        "text",
        "workers",
        "The workers' Python interpreter.",
        metavar="PATH",
        absent=_of_torchrun("PYTHON_EXEC"),
    ),
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
    _row(
        "--isolate-gpus",
        "flag",
        "workers",
        "Each worker sees only its own GPU, as device 0.",
        absent=_of_torchrun("--virtual-local-rank"),
    ),
    _row(
        "--preload",
        "text",
        "workers",
        "Import these once, and fork workers from there at each start.",
        metavar="MODULE,...",
    ),
    _row(
        "--max-restarts",
        "whole",
        "failure",
        "How often the job may be started again; see --min-uptime for failures that repeat.",
        metavar="N",
        absent=_of_torchrun("--max-restarts"),
    ),
    _row(
        "--restart-window",
        "seconds",
        "failure",
        "Count only the restarts of this last time.",
        metavar="SECONDS",
    ),
    _row(
        "--restart-delay",
        "delay",
        "failure",
        "Wait so long before a restart; with :MAX twice as long for each in a row, up to MAX.",
        metavar="SECONDS[:MAX]",
    ),
    _row(
        "--min-uptime",
        "seconds",
        "failure",
        "The same failure twice, each earlier than this, ends the job; 0: it is restarted.",
        metavar="SECONDS",
    ),
    _row(
        "--grace",
        "seconds",
        "failure",
        "Time to save and leave when told to stop.",
        metavar="SECONDS",
        absent=_of_torchrun("--shutdown-timeout"),
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
    _row(
        "--log-dir",
        "text",
        "output",
        "Where the job's directory is made (~/.local/state/distlaunch/jobs).",
        metavar="DIR",
    ),
    _row(
        "--node-logs",
        "text",
        "output",
        "File each rank's output on its node as well, in this folder there.",
        metavar="DIR",
        absent=_OWN_LAUNCHERS,
    ),
    _row(
        "--output",
        "text",
        "output",
        "Whose output the console shows; files get all of it.",
        metavar="all|none|RANKS",
        absent=_of_torchrun("--local-ranks-filter"),
    ),
    _row(
        "--format",
        "choice",
        "output",
        "How the console shows it: rich on a terminal, else plain.",
        choices=("rich", "plain", "jsonl"),
    ),
    _row("--quiet", "flag", "output", "None of our own lines, except warnings and errors."),
    _row(
        "--dry-run",
        "flag",
        "output",
        "Print the plan, start nothing.",
        variable=None,
        absent=_not_in(
            *_RENDERED,
            why="render starts nothing",
            hint="leave it out; distlaunch plan shows what a launcher would do",
        )
        | _not_in("torchrun", why="torchrun has no such option"),
    ),
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
