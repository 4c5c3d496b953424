"""Detect another launcher that started this launcher as one of its workers. No I/O.

torchrun, horovodrun, accelerate, deepspeed and distlaunch pass each worker its rank in variables.
As such a worker, distlaunch runs one worker of its own with the same variables. mpirun, srun and
pods are not outer launchers: the launchers that they start form one job.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterable, Mapping, Sequence

from distlaunch.core.errors import UsageError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.plan import LaunchPlan, OuterLauncher
from distlaunch.core.model.record import replace
from distlaunch.core.model.run_files import Layout
from distlaunch.core.model.text import counted, printable
from distlaunch.core.model.topology import Node, Topology, plain_notes
from distlaunch.core.model.variables import BACKEND_OPTIONS, OF_OUTER_LAUNCHERS
from distlaunch.core.probe.ancestors import Ancestor
from distlaunch.planning.backend import PlannedBackend
from distlaunch.planning.devices import CUDA, HIP, ROCR
from distlaunch.planning.facts import Facts
from distlaunch.planning.train_options import TorchrunOptions, TrainOptions, on_cpus

OURS = "distlaunch"
SPAWNER = "dl-spawner"
"""Process name of the spawner, the parent of our workers, set by ``core.agent.spawner``."""
_SHELLS = ("sh", "bash", "dash", "ash", "zsh", "ksh", "mksh", "fish", "csh", "tcsh", "busybox")
_WRAPPERS = frozenset({
    *_SHELLS, "env", "nice", "ionice", "chrt", "taskset", "numactl", "prlimit", "timeout", "time", "stdbuf", "unbuffer",
    "script", "setsid", "nohup", "chronic", "flock", "sudo", "su", "gosu", "setpriv", "runuser", "unshare", "nsenter",
    "tini", "dumb-init", "catatonit", "systemd-run", "strace", "ltrace", "perf", "gdb", "rr", "nsys", "nsys-launcher",
    "ncu", "rocprof", "rocprofv3", "uv", "conda", "mamba", "micromamba", "pixi", "hatch", "pdm", "poetry", "pipenv",
    "apptainer", "singularity", "starter", "starter-suid", "enroot",
})  # fmt: skip
"""Programs that only run the command that follows them."""
_BY_PROGRAM = {
    **dict.fromkeys(("torchrun", "torch.distributed.run", "torch.distributed.launch"), "torchrun"),
    **dict.fromkeys(("accelerate", "accelerate-launch"), "accelerate"),
    **dict.fromkeys(
        ("accelerate.commands.launch", "accelerate.commands.accelerate_cli"), "accelerate"
    ),
    **dict.fromkeys(("deepspeed.launcher.launch", "deepspeed.launcher.runner"), "deepspeed"),
    **dict.fromkeys(("deepspeed", "deepspeed.pt", "ds"), "deepspeed"),
    **dict.fromkeys(("horovodrun", "horovod.runner.launch", "horovod.runner"), "horovodrun"),
}
"""Scripts and modules that are launchers."""
_RUN_OTHERS = frozenset(
    {"coverage", "debugpy", "pdb", "cProfile", "viztracer", "pyinstrument", "memray"}
)
"""Python programs that run another one in their own process."""
PYTHON_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_SPAWN = "--multiprocessing-fork"
"""Argument of a process of Python's multiprocessing, from which Horovod's launcher starts each
worker."""
_RANK_VARIABLES = {
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
}
_MARKERS = {
    "torchrun": "TORCHELASTIC_RUN_ID",
    "accelerate": "TORCHELASTIC_RUN_ID",
    OURS: "DISTLAUNCH_JOB_ID",
}
"""A variable that only workers of this launcher have."""
_SET_BY_US = frozenset(
    {
        "TORCHELASTIC_ERROR_FILE",
        "DISTLAUNCH_RUN_DIR",
        "DISTLAUNCH_COOKIE",
        "DISTLAUNCH_PROGRESS_FD",
        "DISTLAUNCH_STACKS_FD",
        "DISTLAUNCH_BOOT",
        "DISTLAUNCH_WARM_FD",
    }
)
"""Variables that a worker gets from this launcher and not from the outer one."""
_OF_THE_JOB = ("DISTLAUNCH_JOB_ID", "DISTLAUNCH_ATTEMPT")
_OF_THE_BACKEND = ("DISTLAUNCH_BACKEND", BACKEND_OPTIONS)
_BACKEND_NEEDS = {"horovod": "HOROVOD_RANK", "tensorflow": "TF_CONFIG"}
_DECIDED_BY_OUTER = (
    "num_gpus", "gpus_per_node", "num_procs", "procs_per_node", "num_nodes", "hosts", "hostfile", "discover", "include",
    "exclude", "spares", "spread", "node_rank", "master_addr", "master_port", "interface", "rendezvous", "gpus",
    "isolate_gpus", "bind", "max_restarts", "requeue",
)  # fmt: skip
"""Fields that the outer launcher decides."""
_ALLOWED_VALUES = {
    "num_gpus": 1,
    "gpus_per_node": 1,
    "num_procs": 1,
    "procs_per_node": 1,
    "num_nodes": 1,
    "hosts": "localhost:1",
}


def outer_launcher(
    environ: Mapping[str, str], ancestors: Iterable[Ancestor]
) -> OuterLauncher | None:
    """Return the launcher whose worker this process is, if any.

    Between the two processes only shells and programs that run a command unchanged are allowed. If
    a worker's script starts a launcher, the script's process is between them, so this launcher is
    no worker. The variables must have the ranks.
    """
    launcher = _nearest_launcher(environ, ancestors)
    if launcher is None or (launcher in _MARKERS and _MARKERS[launcher] not in environ):
        return None
    numbers = [
        environ.get(name, "") for name in _RANK_VARIABLES.get(launcher, _RANK_VARIABLES["torchrun"])
    ]
    if not all(number.isascii() and number.isdecimal() for number in numbers):
        return None
    rank, world_size, local_rank = map(int, numbers)
    return OuterLauncher(launcher=launcher, rank=rank, world_size=world_size, local_rank=local_rank)


def is_below_a_worker(ancestors: Iterable[Ancestor]) -> bool:
    """Return whether a worker of another launcher has started this process."""
    for each in ancestors:
        arguments = _program_and_arguments(each.argv)
        if each.name == SPAWNER or (arguments and os.path.basename(arguments[0]) in _BY_PROGRAM):
            return True
    return False


def _nearest_launcher(environ: Mapping[str, str], ancestors: Iterable[Ancestor]) -> str | None:
    """Return the name of the launcher above this process; None if another program than a wrapper
    comes first."""
    through_spawn = False
    for each in ancestors:
        if each.name == SPAWNER:
            return None if through_spawn else OURS
        arguments = _program_and_arguments(each.argv)
        program = os.path.basename(arguments[0]).lstrip("-") if arguments else ""
        if program in _BY_PROGRAM:
            launcher = _BY_PROGRAM[program]
            return launcher if not through_spawn or launcher == "horovodrun" else None
        if program.startswith("sshd") and "HOROVOD_RANK" in environ:
            return "horovodrun"  # it starts workers on other nodes by ssh
        if _SPAWN in each.argv:
            through_spawn = True
        elif program not in _WRAPPERS:
            return None
    return None


def _program_and_arguments(argv: Sequence[str]) -> Sequence[str]:
    """Return the program of a process and its arguments; of an interpreter, the script or
    module."""
    if not argv or not os.path.basename(argv[0]).startswith("python"):
        return argv
    arguments = [*argv[1:]]
    while arguments:
        argument = arguments.pop(0)
        if argument == "-m" and arguments:
            argument = arguments[0]
        elif argument in PYTHON_OPTIONS_WITH_VALUE and arguments:
            arguments.pop(0)
            continue
        elif argument == "-c":
            return ()
        elif argument.startswith("-"):
            continue
        else:
            arguments.insert(0, argument)
        if os.path.basename(arguments[0]) not in _RUN_OTHERS:
            return arguments
        arguments.pop(0)
        while (
            arguments and arguments[0] != "-m" and os.path.basename(arguments[0]) not in _BY_PROGRAM
        ):
            arguments.pop(0)
    return ()


def check_options(
    options: TrainOptions, backend: PlannedBackend, environ: Mapping[str, str], outer: OuterLauncher
) -> None:
    """Raise UsageError for options that the outer launcher decides, such as sizes, nodes and
    restarts, and for a backend whose variables it does not set."""
    who = _launcher_name(outer)
    started = f"{who} started this launcher as rank {outer.rank} of {outer.world_size}"
    way_out = (
        "" if options.dialect.is_drop_in else f"; {Opt.SOURCE('flags')} runs a job of its own here"
    )
    for field in _DECIDED_BY_OUTER:
        if (
            getattr(options, field) != _ALLOWED_VALUES.get(field)
            and (name := options.who_set(field)) is not None
        ):
            value: object = getattr(options, field)
            shown = name if isinstance(value, bool) else f"{name} {printable(_value_text(value))}"
            if (
                field == "hosts" and "hosts" not in options.given
            ):  # a drop-in command translates a number of workers to hosts
                shown = f"{counted(int(str(value).rpartition(':')[2]), 'worker')}"
            raise UsageError(
                f"{shown}: {started}, and it runs one worker as {who} has planned it",
                hint=f"pass the option to {who}, or leave it out{way_out}",
            )
    if isinstance(options, TorchrunOptions) and options.workers != 1:
        raise UsageError(
            f"--nproc-per-node {options.workers}: {started}, and it runs one worker as {who} has "
            "planned it",
            hint=f"pass the option to {who}, or leave it out",
        )
    needed = _BACKEND_NEEDS.get(backend.name)
    if backend.name == "ray" or (needed is not None and needed not in environ):
        raise UsageError(
            f"{Opt.BACKEND(backend.name)}: {started}, and does not give its workers what "
            f"{backend.name} needs",
            hint=f"distlaunch train --backend {backend.name} without {who}{way_out}",
        )


def _launcher_name(outer: OuterLauncher) -> str:
    return "another distlaunch" if outer.launcher == OURS else outer.launcher


def _value_text(value: object) -> str:
    return ":".join(map(str, value)) if isinstance(value, tuple) else str(value)


def single_worker_topology(options: TrainOptions, facts: Facts, outer: OuterLauncher) -> Topology:
    """Return this machine with one worker, for a launcher that is itself a worker.

    The worker sees the same devices as this launcher. With options for CPUs, it sees no GPU.
    """
    node = Node(host=facts.hostname, slots=1)
    if on_cpus(options):
        hidden = tuple(name for name in (HIP, ROCR) if name in facts.environ)
        node = replace(node, mask_variable=CUDA, masks=((),), hidden=hidden)
    notes: tuple[str, ...] = ()
    if outer.rank == 0:
        who = _launcher_name(outer)
        note = (
            f"{who} started this launcher as rank 0 of {outer.world_size}: each launcher runs one "
            "worker with the"
            f" variables of {who}, which also decides about restarts"
        )
        notes = (note,)
    # Under torchrun's name notes are not shown.
    warns = isinstance(options, TorchrunOptions)
    return Topology(
        nodes=(node,),
        device="cpu",
        notes=() if warns else plain_notes(notes),
        warnings=notes if warns else (),
        source=outer.launcher,
    )


def as_outer_worker(
    plan: LaunchPlan, options: TrainOptions, facts: Facts, outer: OuterLauncher
) -> LaunchPlan:
    """Return the plan with the outer launcher's variables instead of the variables of a separate
    job."""
    ours = {*_SET_BY_US}
    if outer.launcher != OURS:
        ours.update(_OF_THE_JOB)
    if outer.launcher != OURS or "backend" in options.given:
        ours.update(_OF_THE_BACKEND)
    names = OF_OUTER_LAUNCHERS - ours
    kept = {name: facts.environ[name] for name in names if name in facts.environ}

    def without(env: Mapping[str, str]) -> dict[str, str]:
        return {
            name: value
            for name, value in env.items()
            if name not in names and name != "OMP_NUM_THREADS"
        }

    return replace(
        plan,
        outer=outer,
        master_addr=facts.environ.get("MASTER_ADDR"),
        layout=_layout_of_rank(plan.layout, outer.rank),
        base_env={**plan.base_env, **kept},
        env=without(plan.env),
        nodes=tuple(replace(node, env=without(node.env)) for node in plan.nodes),
        workers=tuple(replace(worker, env=without(worker.env)) for worker in plan.workers),
        repeated={},
        store=False,
        worker_ports=0,
        notes=plan.notes if outer.rank == 0 else (),
    )


def _layout_of_rank(layout: Layout, rank: int) -> Layout:
    parts = ("folder", "stdout", "stderr", "error", "stacks")
    return replace(layout, **{part: getattr(layout, part).format(rank=rank) for part in parts})
