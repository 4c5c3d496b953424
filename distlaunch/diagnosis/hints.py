"""One line of advice for each cause for which a concrete one is known."""

from __future__ import annotations

import re

from distlaunch.core.model.record import fields_of
from distlaunch.diagnosis.evidence import FailureEvidence
from distlaunch.diagnosis.native import signal_name
from distlaunch.planning.train_options import NO_LOCAL_RANK, TrainOptions

_SHM = (
    "a full /dev/shm or an out-of-memory kill does this: `df -h /dev/shm`, `dmesg`; use fewer "
    "loader workers"
)
_LOADER = f"a loader worker may have been killed: {_SHM}"
_BLOCKING = "set CUDA_LAUNCH_BLOCKING=1 to see the line that launched the kernel"

_DEBUGGER = (
    "it found no input; one worker alone on a terminal has the terminal: --num-procs 1 (or "
    "--num-gpus 1)"
)
_ANY_PYTHON = "the workers' Python"
DASHES = (
    "the script got `--` as its first argument, and its own parser took it: leave out the "
    "`--` behind SCRIPT"
)
_NOT_PYTHON = "is this no Python program? --no-python runs it as it is (it must be executable)"
_NO_SOURCE = (
    "source code cannot contain null bytes",
    "source code string cannot contain",
    "Non-UTF-8 code starting",
)

_NOT_THE_SCRIPTS = re.compile(
    r"(?:unrecognized arguments: |no such option: |not used by the HfArgumentParser: |unknown "
    r"command line flag )(.*)",
    re.IGNORECASE,
)
"""The errors of argparse, click, optparse, Transformers and absl about options that a script does
not have."""
_NO_OPTIONS = {"script_args", "given", "whole_nodes", "whole_gpus"}

_PORT_TAKEN = ("address already in use", "eaddrinuse")

_BY_TEXT: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (
            "cannot start the worker (fork): resource temporarily unavailable",
            "can't start new thread",
        ),
        (
            "a limit of threads or memory is reached: see `ulimit -u`, `ulimit -v`, pids.max of "
            "the "
            "cgroup, and `free -h`"
        ),
    ),
    (
        ("distlaunch: cannot enter the working directory",),
        "it was there when the job was planned: has it been removed, or its file system unmounted?",
    ),
    (("cannot start the worker (pipe)",), "the limit of open files is reached: see `ulimit -n`"),
    (("killed by signal: ", "dataloader worker (pid"), _SHM),
    (("insufficient shared memory", "unable to open shared memory", "unable to mmap"), _SHM),
    (
        (
            "cuda out of memory",
            "outofmemoryerror",
            "cuda error: out of memory",
            "hip out of memory",
        ),
        (
            "GPU memory is full: try a smaller batch; `nvidia-smi` shows whether another process "
            "holds "
            "some"
        ),
    ),
    (
        ("can't allocate memory", "cannot allocate memory", "memoryerror", "bad_alloc"),
        (
            "host memory (not GPU memory) could not be had: see `free -h`, `ulimit -v`; every rank "
            "loads its own copy"
        ),
    ),
    (("device-side assert",), f"a kernel found an index or a value out of range: {_BLOCKING}"),
    (("illegal memory access",), _BLOCKING),
    (
        ("no kernel image",),
        (
            "this torch build has no kernels for this GPU: compare torch.cuda.get_arch_list() with "
            "the "
            "card"
        ),
    ),
    (
        ("no nvidia driver", "driver version is insufficient"),
        "the GPU driver is missing or too old: compare `nvidia-smi` with torch.version.cuda",
    ),
    (
        ("invalid device ordinal",),
        (
            "a rank asks for a GPU that it does not see: torch.cuda.set_device(LOCAL_RANK), no "
            "more "
            "workers than GPUs"
        ),
    ),
    (
        ("duplicate gpu",),
        (
            "two ranks use the same GPU: call torch.cuda.set_device(LOCAL_RANK) before the group "
            "is "
            "made"
        ),
    ),
    (
        ("unhandled system error", "ncclsystemerror"),
        (
            "NCCL could not use the network or shared memory: set NCCL_DEBUG=INFO, and "
            "NCCL_SOCKET_IFNAME if need be"
        ),
    ),
    (
        ("no space left on device",),
        "a disk is full (or its inodes): `df -h` and `df -i` where this file lies",
    ),
    (("disk quota exceeded",), "a disk quota is used up: `quota -s`"),
    (
        _PORT_TAKEN,
        (
            "the port is taken: `ss -ltnp` names the process; without --master-port a free one is "
            "chosen"
        ),
    ),
    (
        ("too many open files",),
        (
            "raise the limit (`ulimit -n`), or "
            "torch.multiprocessing.set_sharing_strategy('file_system')"
        ),
    ),
    (
        ("cannot open shared object file",),
        (
            "a shared library is not found: is the environment loaded (--setup), LD_LIBRARY_PATH "
            "set "
            "for workers?"
        ),
    ),
    (
        ("undefined symbol",),
        "an extension was built against another version of its library: rebuild or reinstall it",
    ),
    (
        ("cuda unknown error", "cuda initialization"),
        "`nvidia-smi` tells whether the driver works; a fork after CUDA was started breaks it too",
    ),
    (
        ("before the current process has finished its bootstrapping",),
        "guard the script's main part with `if __name__ == '__main__':`",
    ),
    (
        ("expected to have finished reduction in the prior iteration",),
        "some parameters got no gradient: find_unused_parameters=True, or use them all in the loss",
    ),
    (
        ("deepspeed requires --deepspeed_config",),
        (
            "-o config=FILE -o pass-config=deepspeed passes one; -o zero and -o config alone are "
            "for "
            "Accelerate's scripts"
        ),
    ),
    (
        ("train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size",),
        (
            "are the sizes for so many workers? On CPUs Accelerate comes to DeepSpeed with one "
            "worker "
            "alone: --num-procs 1"
        ),
    ),
)

_BY_SIGNAL = {
    "SIGBUS": "SIGBUS mostly means a full /dev/shm (or a truncated mapped file): see `df -h "
    "/dev/shm`",
    "SIGILL": "the binary was built for another CPU: compare `lscpu` with what the extension was "
    "compiled for",
    "SIGXCPU": "a CPU time limit is set: `ulimit -t`",
    "SIGXFSZ": "a file size limit is set: `ulimit -f`",
    "SIGSEGV": "run with -x PYTHONFAULTHANDLER=1 to get the Python line",
    "SIGABRT": "run with -x PYTHONFAULTHANDLER=1 to get the Python line",
    "SIGPIPE": "native code wrote to a pipe or socket whose reader was gone",
}


def hint_for(
    evidence: FailureEvidence,
    *,
    python: str | None,
    world_size: int,
    adds_local_rank: bool = False,
    dashes_first: bool = False,
    master_port: int | None = None,
) -> str | None:
    """Return one line that tells the user what to check. Return None if no useful hint is known.

    See ``first_cause.diagnose`` for the parameters.
    """
    text = f"{evidence.exception_type or ''}: {evidence.message or ''}\n{evidence.text}".lower()
    if evidence.main_module is not None:
        if "cannot be directly executed" in text:
            return (
                f"{evidence.main_module} has no module __main__: name the module in it that is "
                "to run"
            )
        return _missing_module(
            evidence.main_module, python, folder="the working directory (--workdir)"
        )
    if _is_no_python(evidence):
        return _NOT_PYTHON
    if world_size > 1 and _asked_for_input(evidence):
        return _DEBUGGER
    if dashes_first and (
        evidence.repeats == "usage error" or _NOT_THE_SCRIPTS.search(evidence.message or "")
    ):
        return DASHES
    if refused := _NOT_THE_SCRIPTS.search(evidence.message or ""):
        if adds_local_rank and "--local_rank=" in refused[1].replace(
            "--local-rank", "--local_rank"
        ):
            return NO_LOCAL_RANK
        if hint := _misplaced(refused[1]):
            return hint
    if (name := missing_module(evidence)) is not None:
        return _missing_module(name, python, folder="the script's folder")
    if package := re.search(r"no package metadata was found for ([\w.-]+)", text):
        return (
            f"a library needs the package {package[1]}: {python or _ANY_PYTHON} -m pip install "
            f"{package[1]}"
        )
    if (
        master_port
        and any(mark in text for mark in _PORT_TAKEN)
        and re.search(rf"\b{master_port}\b", text)
    ):
        return _own_port(evidence.end.rank, master_port, world_size)
    for marks, hint in _BY_TEXT:
        if any(mark in text for mark in marks):
            return hint
    if evidence.loader_may_be_gone and evidence.end.returncode == 1:
        return _LOADER
    if evidence.end.returncode < 0:
        return _signal_hint(evidence)
    if evidence.end.returncode == 127:
        return "the command was not found: is it in the workers' PATH (see --workdir, --setup)?"
    if evidence.end.returncode == 126:
        return "the command cannot be executed: is it executable, and for this machine?"
    if evidence.end.returncode == 137:
        return "a process inside was killed: look for an out-of-memory kill in `dmesg -T`"
    return None


def _own_port(rank: int, port: int, world_size: int) -> str | None:
    """Return a hint that the port in use is the job's own port, on which rank 0 listens for all
    workers."""
    own = f"port {port} is this job's own (MASTER_PORT)"
    if rank:
        return (
            f"{own}, and rank 0 listens on it: rank {rank} tried to, as the script gives every "
            "worker rank 0; use RANK"
        )
    if world_size > 1:
        return (
            f"{own}: does the script give another worker rank 0, or does rank 0 open the port "
            "twice?"
        )
    return f"{own}: does the script open it twice?"


def missing_module(evidence: FailureEvidence) -> str | None:
    """Return the name of the missing module, if its absence ended the worker."""
    if evidence.main_module is not None:
        return evidence.main_module
    if evidence.repeats != "import error":
        return None
    name = re.search(
        r"no module named '?([\w.]+)", f"{evidence.message or ''}\n{evidence.text}", re.IGNORECASE
    )
    return name[1] if name else None


def _missing_module(name: str, python: str | None, *, folder: str) -> str:
    return (
        f"{python or _ANY_PYTHON} has no module {name}, nor has {folder}: is the name right? "
        "If so, install it for that interpreter, or choose another with --python"
    )


def _misplaced(said: str) -> str | None:
    """Return where an option may belong that the script did not know, if distlaunch has an option
    of that name."""
    ours = fields_of(TrainOptions).keys() - _NO_OPTIONS
    names = re.findall(r"(?:--|^')([a-z][\w-]+)", said)
    field = next((name.replace("-", "_") for name in names if name.replace("-", "_") in ours), None)
    if field is None:
        return None
    name = field.replace("_", "-")
    return (
        f"distlaunch has an option --{name}, which goes before SCRIPT: what follows SCRIPT is "
        "the script's own"
    )


def _asked_for_input(evidence: FailureEvidence) -> bool:
    """Return whether a debugger or ``input()`` ended the worker because stdin had no data."""
    if evidence.exception_type is None:
        return b"(Pdb) " in evidence.end.stderr_tail[-4096:]
    return evidence.exception_type == "bdb.BdbQuit" or (
        evidence.exception_type == "EOFError" and evidence.message == "EOF when reading a line"
    )


def _is_no_python(evidence: FailureEvidence) -> bool:
    """Return whether Python was given a shell script or a binary.

    The name of the file, the shown line and the error message tell.
    """
    file = (evidence.frame or "").partition(" in ")[0].rpartition(":")[0]
    if file.endswith((".sh", ".bash", ".zsh", ".ksh")):
        return True
    if evidence.repeats != "syntax error" or file.endswith(".py"):
        return False
    return (evidence.message or "").startswith(_NO_SOURCE) or any(
        line.lstrip().startswith("#!") and "sh" in line for line in evidence.excerpt
    )


_AT_EXIT = b"terminate called without an active exception"
_NO_ADDRESS = b"Unable to find address for: "
"""gloo prints this and aborts, or crashes without it, depending on the resolver's answer."""
_IN_HOROVODS_INIT = re.compile(rb'horovod/common/basics\.py", line \d+ in init')


def _signal_hint(evidence: FailureEvidence) -> str | None:
    name = signal_name(-evidence.end.returncode)
    if name == "SIGKILL":
        if evidence.end.oom_kills:
            return (
                "the host or the cgroup ran out of memory: fewer loader workers, smaller "
                "caches, or a higher limit"
            )
        return (
            "an operator, a scheduler's limit, or an out-of-memory kill that we cannot see does "
            "this: `dmesg -T` tells"
        )
    tail = evidence.end.stderr_tail
    has_no_address = name == "SIGSEGV" or (name == "SIGABRT" and _NO_ADDRESS in tail)
    if has_no_address and _IN_HOROVODS_INIT.search(tail):
        return (
            "Horovod crashes where a machine's own name has no address: see `getent hosts "
            "$(hostname)` there"
        )
    if evidence.frame is not None and name in ("SIGSEGV", "SIGABRT"):
        return None
    if evidence.exception_type is not None and name in ("SIGABRT", "SIGSEGV"):
        return None
    if name == "SIGABRT" and _AT_EXIT in tail:
        return (
            "torch does this at exit where a process group still has threads: "
            "end with dist.monitored_barrier(), then dist.destroy_process_group()"
        )
    return _BY_SIGNAL.get(name)
