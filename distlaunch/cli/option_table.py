"""The option table of train, from which parser, completion and help are made.

An option's default is that of the field in ``TrainOptions``, or comes from its variable. Workers
get none of these variables, so a launcher started by a worker inherits no options.

``absent`` lists the commands and file formats to which an option does not apply. In all others it
applies: ``render`` writes it, ``torchrun`` reads its variable, the other drop-ins accept it.
"""

from __future__ import annotations

from collections.abc import Mapping

from distlaunch.cli.option import Absence, Group, Kind, Option, Place
from distlaunch.core.model.record import defaults_of
from distlaunch.planning.train_options import TrainOptions

GROUP_TITLES: dict[Group, str] = {
    "script": "Script",
    "size": "Workers and GPUs",
    "nodes": "Nodes",
    "ssh": "SSH",
    "slurm": "Slurm",
    "rendezvous": "Connections between nodes",
    "backend": "Backend",
    "workers": "Environment of the workers",
    "failure": "Failures, restarts and hangs",
    "output": "Output and logs",
    "render": "The file, and the resources of the job",
    "no effect": "Accepted without effect",
    "refused": "Refused, with an explanation",
}

_DEFAULTS = defaults_of(TrainOptions)
HELP_FLAGS = ("--help", "-h")
LEAST_LOST_S = 5.0
"""Least value of --lost-after. Nodes are pinged every 2 s."""
LEAST_JOIN_S = 0.1
"""Within a shorter time no launcher can connect."""
LEAST_SILENCE_S = 1.5
"""Heartbeats are reported once per second, so a shorter silence cannot be detected."""


def _row(
    flags: str,
    kind: Kind,
    group: Group,
    help: str,  # noqa: A002 - named as the field that it fills
    *,
    field: str | None = None,
    metavar: str = "",
    unset: str = "",
    choices: tuple[str, ...] = (),
    variable: str | None = "",
    repeatable: bool = False,
    once: bool = False,
    least_s: float = 0.0,
    absent: Mapping[Place, Absence] | None = None,
    unset_at: Mapping[Place, str] | None = None,
) -> Option:
    """Return a row. By default, field and variable are derived from the long flag."""
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
        unset=unset,
        choices=choices,
        repeatable=repeatable,
        once=once,
        least_s=least_s,
        absent=absent or {},
        unset_at=unset_at or {},
    )


_PODS: tuple[Place, ...] = ("kubernetes", "pytorchjob", "trainjob")
_RENDERED: tuple[Place, ...] = ("slurm", *_PODS)
_DROP_INS: tuple[Place, ...] = ("torchrun", "accelerate", "deepspeed", "horovodrun")


def _not_in(*places: Place, why: str, hint: str = "", instead: str = "") -> dict[Place, Absence]:
    return dict.fromkeys(places, Absence(why=why, hint=hint, instead=instead))


def _of_torchrun(name: str) -> dict[Place, Absence]:
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
        "The training script, as an option. More options may follow it.",
        metavar="PATH",
        variable=None,
        absent=_AFTER_OPTIONS,
        unset="the first word that is not an option",
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
        "SCRIPT is an executable program, which is not run by Python.",
        variable=None,
        absent=_of_torchrun("--no-python") | _COMMAND,
    ),
    _row(
        "--num-gpus",
        "count or auto",
        "size",
        "Number of workers in the whole job, one per GPU. auto counts every visible GPU.",
        metavar="N|auto",
        absent=_TOTAL
        | _not_in("accelerate", why=_NUM_PROCESSES, instead="--num_processes")
        | _not_in("deepspeed", why="--num_gpus is the number on each node"),
        unset="auto; one CPU worker on a machine without GPUs",
        unset_at=dict.fromkeys(_RENDERED, "not set; render needs it or a number per node"),
    ),
    _row(
        "--gpus-per-node",
        "count",
        "size",
        "Number of workers on each node, one per GPU (torchrun: --nproc-per-node).",
        metavar="N",
        absent=_SIZE | _not_in("accelerate", why=_NUM_PROCESSES, instead="--num_processes"),
        unset="every visible GPU",
        unset_at=dict.fromkeys(_RENDERED, "not set; render needs it or another number of workers"),
    ),
    _row(
        "--num-procs",
        "count",
        "size",
        "Number of CPU workers in the whole job. GPUs are hidden from them, "
        "unless --device cuda lets them share the GPUs.",
        metavar="N",
        absent=_TOTAL | _CPU_SIZE,
        unset="not set; workers are counted by GPUs",
        unset_at=dict.fromkeys(_RENDERED, "not set"),
    ),
    _row(
        "--procs-per-node",
        "count",
        "size",
        "Number of CPU workers on each node.",
        metavar="N",
        absent=_SIZE | _CPU_SIZE,
        unset="not set; workers are counted by GPUs",
        unset_at=dict.fromkeys(_RENDERED, "not set"),
    ),
    _row(
        "--device",
        "choice",
        "size",
        "Device that the workers use. auto is cuda where the node has GPUs and "
        "no number of CPU workers is given.",
        choices=("auto", "cuda", "cpu"),
        absent=_of_torchrun("CUDA_VISIBLE_DEVICES")
        | _not_in("accelerate", why="--cpu chooses the CPU, the configuration a GPU"),
    ),
    _row(
        "--gpus",
        "text",
        "size",
        "Use these GPUs, in this order. Each is an index or a UUID.",
        metavar="0,2|UUID,...",
        absent=_not_in(
            *_RENDERED,
            why="which GPUs a node gives to the job is the scheduler's choice",
            hint="--gpus-per-node N says how many",
        ),
        unset="all visible GPUs",
    ),
    _row(
        "--num-nodes",
        "count or range",
        "nodes",
        "Number of nodes. With MIN:MAX, nodes may leave and join while the job runs.",
        metavar="N|MIN:MAX",
        absent=_of_torchrun("--nnodes")
        | _not_in("accelerate", why="Accelerate has an option of its own", instead="--num_machines")
        | _SLOTS,
        unset="all nodes that are known",
        unset_at=dict.fromkeys(_RENDERED, "1"),
    ),
    _row(
        "--hosts",
        "text",
        "nodes",
        "Start workers on these hosts by SSH. The number after the colon is the "
        "number of workers on that host.",
        metavar="a:4,n[01-04]:8,...",
        once=True,
        absent=_HOSTS,
        unset="not set; the scheduler names the nodes, else this machine is the only one",
    ),
    _row(
        "--hostfile",
        "text",
        "nodes",
        "Read the hosts from a file in the format of Open MPI, Horovod, DeepSpeed, MPICH or PBS.",
        metavar="FILE",
        once=True,
        absent=_HOSTS,
        unset="not set",
    ),
    _row(
        "--discover",
        "text",
        "nodes",
        "Run this command to get the hosts. It prints one HOST or HOST:SLOTS per line.",
        metavar="COMMAND",
        once=True,
        absent=_HOSTS | _SLOTS,
        unset="not set",
    ),
    _row(
        "--include",
        "text",
        "nodes",
        "Use only these hosts, or only these slots of a host.",
        metavar="w0@w1:0,2",
        absent=_CHOSEN | _SLOTS,
        unset="all hosts",
    ),
    _row(
        "--exclude",
        "text",
        "nodes",
        "Leave these hosts out, or these slots of a host.",
        metavar="w0@w1:0,2",
        absent=_CHOSEN | _SLOTS,
        unset="none",
    ),
    _row(
        "--spares",
        "whole",
        "nodes",
        "Number of hosts that wait, and that replace lost hosts.",
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
        "Distribute the workers over the nodes in turn, instead of filling one "
        "node after the other.",
        absent=_OWN_LAUNCHERS | _SLOTS,
    ),
    _row(
        "--node-rank",
        "whole",
        "nodes",
        "Rank of this node, if each node has a launcher. The first node has rank 0.",
        metavar="N",
        absent=_not_in(*_RENDERED, why="each node finds out by itself which it is")
        | _of_torchrun("--node-rank")
        | _not_in("accelerate", why="Accelerate has an option of its own", instead="--machine_rank")
        | _SLOTS,
        unset="assigned by node 0's launcher",
    ),
    _row(
        "--source",
        "text",
        "nodes",
        "System that names the nodes. flags ignores the environment.",
        metavar="auto|flags|slurm|...",
        absent=_OWN_LAUNCHERS,
        unset="auto, the system that started this process",
    ),
    _row(
        "--explain",
        "flag",
        "nodes",
        "Show where each value of the plan comes from, and which other sources lost.",
        absent=_not_in("torchrun", why="sizes are those of the command line"),
    ),
    _row(
        "--ssh-user",
        "text",
        "ssh",
        "Log in as this user.",
        metavar="NAME",
        absent=_SSH,
        unset="as in ssh_config",
    ),
    _row(
        "--ssh-port",
        "port",
        "ssh",
        "Port of the SSH servers.",
        metavar="PORT",
        absent=_SSH,
        unset="as in ssh_config, else 22",
    ),
    _row(
        "--ssh-key",
        "text",
        "ssh",
        "Private key to log in with.",
        metavar="FILE",
        absent=_SSH,
        unset="as in ssh_config",
    ),
    _row(
        "--ssh-config",
        "text",
        "ssh",
        "Read this file instead of the user's and the system's ssh_config.",
        metavar="FILE",
        absent=_SSH,
        unset="~/.ssh/config and /etc/ssh/ssh_config",
    ),
    _row(
        "--ssh-host-keys",
        "choice",
        "ssh",
        "Which host keys to accept: strict only known keys, accept-new also keys "
        "of new hosts, off any key.",
        choices=("strict", "accept-new", "off"),
        absent=_SSH,
    ),
    _row(
        "--ssh-fanout",
        "count",
        "ssh",
        "Number of connections that are opened at the same time.",
        metavar="N",
        absent=_SSH,
    ),
    _row(
        "--ssh-command",
        "text",
        "ssh",
        "Connect with this program instead. ssh supports certificates and "
        "GSSAPI, which the built-in client does not.",
        metavar="COMMAND",
        absent=_SSH,
        unset="the built-in client (paramiko)",
    ),
    _row(
        "--srun-args",
        "text",
        "slurm",
        "More options for the srun that starts the agents, as in "
        "--srun-args='--container-image=IMAGE'.",
        metavar="OPTIONS",
        absent=_BY_SRUN,
        unset="none",
    ),
    _row(
        "--requeue",
        "flag",
        "slurm",
        "Requeue the Slurm job if Slurm interrupted it, for example at its time limit.",
        absent=_BY_SRUN,
        unset_at={"slurm": "on"},
    ),
    _row(
        "--master-addr",
        "text",
        "rendezvous",
        "Address of the node of rank 0, for the workers (MASTER_ADDR).",
        metavar="HOST",
        absent=_FIRST_POD
        | _of_torchrun("--master-addr")
        | _not_in("accelerate", why="it is where the machines meet", instead="--main_process_ip"),
        unset="an address that all nodes can reach",
    ),
    _row(
        "--master-port",
        "port",
        "rendezvous",
        "Port for the workers' rendezvous at rank 0 (MASTER_PORT).",
        metavar="PORT",
        absent=_of_torchrun("--master-port")
        | _not_in("accelerate", why="it is where the machines meet", instead="--main_process_port"),
        unset="a free port",
    ),
    _row(
        "--interface",
        "text",
        "rendezvous",
        "Network that the nodes use to reach each other: the name of an "
        "interface or a subnet like 10.1.0.0/16.",
        metavar="NAME|CIDR",
        absent=_not_in(
            "horovodrun", why="horovodrun has an option of its own", instead="--network-interface"
        ),
        unset="chosen so that all nodes can reach rank 0",
    ),
    _row(
        "--join-timeout",
        "seconds",
        "rendezvous",
        "How long the launcher waits for all nodes to join.",
        metavar="SECONDS",
        least_s=LEAST_JOIN_S,
        absent=_of_torchrun("--rdzv-conf join_timeout"),
        unset="60 s; 15 s for a host that refuses the first connection",
    ),
    _row(
        "--rendezvous",
        "text",
        "rendezvous",
        "Address at which node 0's launcher listens for the others, if each node has a launcher.",
        metavar="HOST:PORT",
        absent=_FIRST_POD
        | _of_torchrun("--rdzv-endpoint")
        | _not_in(
            "accelerate", why="Accelerate has options of its own", instead="--main_process_ip"
        )
        | _not_in("horovodrun", why="one launcher starts the workers of all hosts"),
        unset="not set; from the scheduler, if there is one",
    ),
    _row(
        "--token-file",
        "text",
        "rendezvous",
        "File with a secret that all launchers of the job share. "
        "DISTLAUNCH_TOKEN may hold the secret instead.",
        metavar="FILE",
        unset="no secret",
    ),
    _row("--weak-token-ok", "flag", "rendezvous", "Accept a secret of fewer than 16 characters."),
    _row(
        "--lost-after",
        "seconds",
        "rendezvous",
        "A node that is silent for this long is lost. A node that hears nothing "
        "from the launcher for this long stops its workers.",
        metavar="SECONDS",
        least_s=LEAST_LOST_S,
        absent=_not_in("torchrun", why="torchrun has no such option"),
    ),
    _row(
        "--job-id",
        "text",
        "rendezvous",
        "Name of the job and of its log directory.",
        metavar="ID",
        variable="DISTLAUNCH_TRAIN_JOB_ID",
        absent=_of_torchrun("--rdzv-id"),
        unset="the scheduler's id, else date and time",
    ),
    _row(
        "--backend",
        "backend",
        "backend",
        "Training framework of the script. distlaunch backends lists them.",
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
        "Set an option of the backend. May be repeated. distlaunch backends NAME "
        "lists the options.",
        metavar="NAME=VALUE",
        repeatable=True,
        absent=_FOR_TORCH,
        unset="none",
    ),
    _row(
        "--address",
        "text",
        "backend",
        "Address of the Ray cluster for --backend ray. The same as -o address=ADDRESS.",
        metavar="auto|local|HOST:PORT|ray://HOST:PORT",
        absent=_ONE_BACKEND | _FOR_TORCH,
        unset="not set",
    ),
    _row(
        "-x --env",
        "text",
        "workers",
        "Set a variable for the workers. NAME alone passes the launcher's value "
        "on. May be repeated.",
        metavar="NAME[=VALUE]",
        repeatable=True,
        unset="none",
    ),
    _row(
        "--env-file",
        "text",
        "workers",
        "Read NAME=VALUE lines with variables for the workers. May be repeated.",
        metavar="FILE",
        repeatable=True,
        unset="none",
    ),
    _row(
        "--forward-env",
        "flag",
        "workers",
        "Send the launcher's environment to the other nodes, except variables "
        "that belong to a host.",
        absent=_OWN_LAUNCHERS,
    ),
    _row(
        "--workdir",
        "text",
        "workers",
        "Working directory of the workers.",
        metavar="DIR",
        unset="the current directory",
    ),
    _row(
        "--python",
        "text",
        "workers",
        "Python interpreter of the workers.",
        metavar="PATH",
        absent=_of_torchrun("PYTHON_EXEC"),
        unset="the interpreter that runs distlaunch",
    ),
    _row(
        "--setup",
        "text",
        "workers",
        "Run this command in bash -l before the workers, for example module load cuda.",
        metavar="COMMAND",
        unset="none",
    ),
    _row(
        "--bind",
        "choice",
        "workers",
        "Bind each worker to CPUs: to cores of its own, or to the NUMA node of its GPU.",
        choices=("none", "cores", "numa"),
    ),
    _row(
        "--isolate-gpus",
        "flag",
        "workers",
        "Show each worker only its own GPU, as device 0.",
        absent=_of_torchrun("--virtual-local-rank"),
    ),
    _row(
        "--preload",
        "text",
        "workers",
        "Import these modules once, and fork the workers from that process at each start.",
        metavar="MODULE,...",
        unset="none",
    ),
    _row(
        "--max-restarts",
        "whole",
        "failure",
        "How often the job may restart after a failure. A failure that repeats "
        "early ends the job sooner (--min-uptime).",
        metavar="N",
        absent=_of_torchrun("--max-restarts"),
    ),
    _row(
        "--restart-window",
        "seconds",
        "failure",
        "Count only restarts within this time towards --max-restarts.",
        metavar="SECONDS",
        unset="off; all restarts count",
    ),
    _row(
        "--restart-delay",
        "delay",
        "failure",
        "Wait this long before a restart. With :MAX the delay doubles with each "
        "restart in a row, up to MAX.",
        metavar="SECONDS[:MAX]",
        unset="no delay",
    ),
    _row(
        "--min-uptime",
        "seconds",
        "failure",
        "The job ends if the same failure occurs twice without progress: a higher step, or "
        "without heartbeats this much time. 0 always restarts.",
        metavar="SECONDS",
    ),
    _row(
        "--grace",
        "seconds",
        "failure",
        "Time between SIGTERM and SIGKILL for workers when the job is stopped.",
        metavar="SECONDS",
        absent=_of_torchrun("--shutdown-timeout"),
    ),
    _row(
        "--failure-grace",
        "seconds",
        "failure",
        "Time between SIGTERM and SIGKILL for the other workers when one worker has failed.",
        metavar="SECONDS",
    ),
    _row(
        "--linger",
        "seconds",
        "failure",
        "Time for processes that workers have left behind, after all workers succeeded.",
        metavar="SECONDS",
        unset="the value of --failure-grace",
    ),
    _row(
        "--hang-timeout",
        "seconds",
        "failure",
        "End the attempt if no worker shows a sign of life for this long: a heartbeat, or output "
        "of a worker that sends no heartbeats.",
        metavar="SECONDS",
        least_s=LEAST_SILENCE_S,
        unset="off",
    ),
    _row(
        "--hang-action",
        "choice",
        "failure",
        "After --hang-timeout, stop the job, restart it as --max-restarts allows, or only report "
        "the hang.",
        choices=("stop", "restart", "report"),
    ),
    _row(
        "--error-file",
        "text",
        "failure",
        "Write the first failure to this file in PyTorch's format.",
        metavar="FILE",
        unset="TORCHELASTIC_ERROR_FILE; in a pod the termination log",
    ),
    _row(
        "--hang-notice",
        "seconds",
        "failure",
        "Without --hang-timeout, report once where silent workers are after this time.",
        metavar="SECONDS",
        least_s=LEAST_SILENCE_S,
    ),
    _row(
        "--on-event",
        "text",
        "failure",
        "Run this command when the job starts, fails, hangs, loses a node, restarts or ends. It "
        "gets the event as JSON on stdin. No shell is used.",
        metavar="COMMAND",
        unset="no command",
    ),
    _row(
        "--metrics",
        "text",
        "output",
        "Serve metrics of the job for Prometheus at this port. Without ADDRESS, only this machine "
        "can connect. Port 0 is a free one, which is printed.",
        metavar="[ADDRESS:]PORT",
        unset="not served",
    ),
    _row(
        "--log-dir",
        "text",
        "output",
        "Directory for the job's log directory. The link latest in it leads to the newest job.",
        metavar="DIR",
        unset="~/.local/state/distlaunch/jobs",
    ),
    _row(
        "--log-max-size",
        "size",
        "output",
        "Size of a rank's log file from which its middle is left out: its first half and its last "
        "part stay.",
        metavar="SIZE",
        unset="every byte is kept",
    ),
    _row(
        "--node-logs",
        "text",
        "output",
        "Also write each rank's output on its node, to this directory there.",
        metavar="DIR",
        absent=_OWN_LAUNCHERS,
        unset="off",
    ),
    _row(
        "--output",
        "text",
        "output",
        "Ranks whose output the console shows. Log files have the output of all ranks.",
        metavar="all|none|RANKS",
        absent=_of_torchrun("--local-ranks-filter"),
    ),
    _row(
        "--format",
        "choice",
        "output",
        "Format of the console: rich has colors and a status line, plain has "
        "neither, jsonl is one JSON object per line.",
        choices=("rich", "plain", "jsonl"),
        unset="rich on a terminal, else plain",
    ),
    _row(
        "--quiet", "flag", "output", "Print no messages of distlaunch, except warnings and errors."
    ),
    _row(
        "--detach",
        "flag",
        "output",
        "Return when all workers have started, and print the name of the job, which goes on in the "
        "background.",
        variable=None,
        absent=_not_in(
            *_RENDERED,
            why="the job of a scheduler is in the background already, and would end with its script",
        )
        | _not_in(*_DROP_INS, why="only train has it"),
    ),
    _row(
        "--dry-run",
        "flag",
        "output",
        "Print the plan and start nothing.",
        variable=None,
        absent=_not_in(
            *_RENDERED,
            why="render starts nothing",
            hint="leave it out; distlaunch plan shows what a launcher would do",
        )
        | _not_in("torchrun", why="torchrun has no such option"),
    ),
)

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
