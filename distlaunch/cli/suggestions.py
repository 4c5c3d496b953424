"""Suggest distlaunch's option or command to a user who typed another program's.

Used only after a command line was rejected. Covers torchrun 2.2 to 2.13,
``torch.distributed.launch``, ``mpirun -n``, sbatch and others. Options that distlaunch spells as
torchrun does are not listed.
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence

from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import printable

_ONE_MACHINE = (
    "not needed here: one machine needs no rendezvous, and a free port is held for rank 0"
)
_ENDED_AT_ONCE = "not needed here: the end of a worker is noticed at once"
_STARTED_ANEW = "not needed here: each worker is a program of its own, started anew"

_SBATCH_OPTIONS = {
    "--signal": "--usr1-before SECONDS: when before the time limit the workers get USR1",
    "-t": "--time",
    "-p": "--partition",
    "-A": "--account",
    "-J": "--name",
    "--job-name": "--name",
    "-N": "--num-nodes",
    "--nodes": "--num-nodes",
    "-c": "--cpus",
    "--mem": "--memory",
    "-G": "--num-gpus",
    "--gres": "--gpus-per-node",
    "-n": "--num-procs, or --num-gpus",
    "--ntasks": "--num-procs, or --num-gpus",
    "--ntasks-per-node": "--gpus-per-node, or --procs-per-node for CPU workers",
}
"""Options of ``render`` with the same effect, by option of sbatch."""
_SBATCH_ONLY = {
    *("-C", "-d", "-q", "-w", "-x", "-L", "-a", "-D"),
    *("--array", "--begin", "--chdir", "--cluster-constraint", "--clusters", "--comment"),
    *("--constraint", "--container", "--core-spec", "--cpus-per-gpu", "--deadline", "--dependency"),
    *(
        "--distribution",
        "--export",
        "--gpu-bind",
        "--gpu-freq",
        "--gpus-per-task",
        "--hint",
        "--hold",
    ),
    *("--licenses", "--mail-type", "--mail-user", "--mem-per-cpu", "--mem-per-gpu", "--nice"),
    *(
        "--no-requeue",
        "--nodefile",
        "--nodelist",
        "--ntasks-per-gpu",
        "--oversubscribe",
        "--prefer",
    ),
    *("--priority", "--propagate", "--qos", "--reservation", "--switches", "--threads-per-core"),
    *("--time-min", "--tmp", "--wait", "--wait-all-nodes", "--wckey"),
}
"""Options of sbatch that the user can give to it besides the file."""
_OTHER_COMMANDS = {
    ("kill", "cancel", "down"): "distlaunch stop JOB stops a job; distlaunch ps lists them",
    ("list", "ls", "jobs"): "distlaunch ps --all lists the jobs",
    ("log", "tail"): "distlaunch logs JOB --follow shows the output of a job",
}
"""Hints by name of another program's command."""

_ARGUMENTS_OF_BACKENDS = {"ray": " [--address HOST:PORT]"}
_NOT_TORCHRUNS = ("-n",)
_LEGACY = "torch.distributed.launch"


def _workers_options() -> str:
    gpus, procs = Opt.NUM_GPUS("N"), Opt.NUM_PROCS("N")
    return gpus if gpus == procs else f"{gpus}, or {procs} for CPU workers"


def _torchrun_options() -> dict[str, str]:
    workers = of_node = _workers_options()
    if Opt.GPUS_PER_NODE.exists and str(Opt.GPUS_PER_NODE) != str(Opt.NUM_GPUS):
        gpus, procs = Opt.GPUS_PER_NODE("N"), Opt.PROCS_PER_NODE("N")
        of_node = (
            f"{gpus}, or {procs} for CPU workers; on one machine {Opt.NUM_GPUS('N')}, "
            f"{Opt.NUM_PROCS('N')}"
        )
    nodes = f"{Opt.HOSTS('a:2,b:2')} names the nodes"
    if Opt.NUM_NODES.exists:
        nodes = f"{Opt.NUM_NODES('N')} or MIN:MAX; leave it out on one machine (--nnodes 1)"
    filed = (
        "not needed here: all output is shown and filed, one file for each rank "
        f"({Opt.OUTPUT} chooses what is shown)"
    )
    return {
        "--nproc-per-node": of_node,
        "--nproc": of_node,
        "-n": workers,
        "--nnodes": nodes,
        "--rdzv-id": Opt.JOB_ID("ID"),
        "--rdzv-backend": _ONE_MACHINE,
        "--rdzv-endpoint": f"{_ONE_MACHINE} ({Opt.MASTER_ADDR} and {Opt.MASTER_PORT} fix one)",
        "--rdzv-conf": _ONE_MACHINE,
        "--standalone": _ONE_MACHINE,
        "--local-addr": f"{Opt.MASTER_ADDR('HOST')}, and on one machine it is not needed",
        "--tee": filed,
        "-t": filed,
        "--redirects": filed,
        "-r": filed,
        "--local-ranks-filter": f"{Opt.OUTPUT('RANKS')}, for example {Opt.OUTPUT('0')}: whose "
        "output is shown; files "
        "get all of it",
        "--duplicate-stdout-filters": filed,
        "--duplicate-stderr-filters": filed,
        "--log-line-prefix-template": "not needed here: lines are shown with their rank, and filed "
        f"without; {Opt.FORMAT('jsonl')}",
        "--logs-specs": filed,
        "--event-log-handler": "not needed here: events.jsonl in the job's directory has every event",
        "--monitor-interval": _ENDED_AT_ONCE,
        "--start-method": _STARTED_ANEW,
        "--run-path": f"not needed here: Python runs {Opt.SCRIPT} as it does without a launcher",
        "--role": "not needed here: all workers have one role",
        "--shutdown-timeout": f"{Opt.GRACE('SECONDS')} when the job is stopped, "
        f"{Opt.FAILURE_GRACE('SECONDS')} when a "
        "worker fails",
        "--numa-binding": f"{Opt.BIND('numa')}, or {Opt.BIND('cores')}",
        "--virtual-local-rank": f"{Opt.ISOLATE_GPUS}: each worker sees only its own GPU, as "
        "device 0",
        "--signals-to-handle": "not needed here: TERM, INT and HUP stop the workers in order",
        "--use-env": "not needed here: LOCAL_RANK is always in the workers' environment",
    }


def _similar_options() -> dict[str, str]:
    workers = _workers_options()
    each = workers
    if Opt.GPUS_PER_NODE.exists:
        each = f"{Opt.GPUS_PER_NODE('N')}, or {Opt.PROCS_PER_NODE('N')} for CPU workers"
    return {
        "--num-workers": f"{workers}; how many workers load data is the script's to say",
        "--workers": workers,
        "--num-processes": workers,
        "--exclusive": "that is an option of sbatch: distlaunch render slurm writes a batch script",
        "--cpus-per-task": "that is an option of sbatch: distlaunch render slurm writes a batch script",
        "--ntasks-per-node": each,
    }


def replace_torchrun_option(flag: str) -> str | None:
    """Return distlaunch's replacement for an option of torchrun, written ``--with-dashes``; None if
    there is none."""
    return _torchrun_options().get(flag)


def replace_similar_option(flag: str) -> str | None:
    """Return distlaunch's replacement for a similar option of another program; None if there is
    none."""
    return _similar_options().get(flag)


def replace_sbatch_option(flag: str) -> str | None:
    """Return the option of ``render`` that replaces an option of sbatch; None if there is none."""
    return _SBATCH_OPTIONS.get(flag)


def is_sbatch_option(flag: str) -> bool:
    """Return whether sbatch has the option, and ``render`` none with the same effect."""
    return flag in _SBATCH_ONLY


def drop_in_note(flag: str) -> str:
    """Return a note that ``distlaunch torchrun`` accepts the option, to append to its replacement;
    empty if it does not."""
    return "" if flag in _NOT_TORCHRUNS else "; or distlaunch torchrun, which takes it as it is"


def suggest_command(args: Sequence[str], names: Sequence[str]) -> str:
    """Return a hint for a command line that begins with no command of distlaunch."""
    from difflib import get_close_matches

    from distlaunch.backends.registry import backend_name_for

    first = args[0]
    program = os.path.basename(first)
    if _LEGACY in args[1:4]:
        return (
            f"its words go after distlaunch {_LEGACY}: distlaunch {_LEGACY} [OPTIONS] SCRIPT "
            "[ARGS]..."
        )
    if program == "torchrun" or "torch.distributed.run" in args[1:4]:
        return (
            "torchrun's words go after distlaunch torchrun: distlaunch torchrun [OPTIONS] "
            "SCRIPT [ARGS]..."
        )
    if program == "accelerate":
        return (
            "distlaunch accelerate launch [OPTIONS] SCRIPT [ARGS]... takes a command line of "
            "accelerate launch"
        )
    if (backend := backend_name_for(first)) is not None:
        more = _ARGUMENTS_OF_BACKENDS.get(backend, "")
        return (
            f"distlaunch train --backend {backend}{more} SCRIPT [ARGS]...; distlaunch backends "
            f"{backend} has more"
        )
    if first.endswith(".py"):
        return f"distlaunch train {printable(first)}"
    if program.startswith("python") or first in ("run", "launch", "exec"):
        return (
            "distlaunch train [OPTIONS] SCRIPT [ARGS]... runs SCRIPT with the Python that "
            "distlaunch has"
        )
    for words, how in _OTHER_COMMANDS.items():
        if first in words:
            return how
    near = get_close_matches(first, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
