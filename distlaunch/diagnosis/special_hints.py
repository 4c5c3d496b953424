"""Functions for rows of the hint tables that need more than a pattern.

A function that returns a hint returns None if the row does not apply, even if its docstring does
not say so. A function that returns a bool is a condition of a row (``when``). ``missing_module``
returns a name, for ``first_cause``.
"""

from __future__ import annotations

import re

from distlaunch.core.model.option_names import Opt, name_of, option_names
from distlaunch.core.model.record import fields_of
from distlaunch.diagnosis.evidence import FailureEvidence
from distlaunch.diagnosis.failure_kinds import Failure
from distlaunch.diagnosis.native import signal_name
from distlaunch.diagnosis.resources import (
    other_process,
    package_root,
    path_in,
    port_in,
)
from distlaunch.planning.train_options import LOCAL_RANK_TOO, TrainOptions

PORT_TAKEN = ("address already in use", "eaddrinuse")
_ANY_PYTHON = "the workers' Python"
_OF_SCRIPT = "the script's folder"
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
"""Errors of argparse, click, optparse, Transformers and absl about unknown options."""
_NO_OPTIONS = {"script_args", "given", "whole_nodes", "whole_gpus"}
_OWN_NAMES = frozenset(
    {"src", "utils", "models", "configs", "modules", "helpers", "tools", "common", "scripts"}
)
"""Usual names of packages in a user's repository, which cannot be installed."""
_NOT_IN_NUMPY = frozenset(
    {"alltrue", "asscalar", "bool8", "cumproduct", "in1d", "msort", "product", "sometrue", "trapz"}
)
"""Names that NumPy 1.23 to 2.4 has removed without a message about it."""
_AT_EXIT = b"terminate called without an active exception"
_NO_ADDRESS = b"Unable to find address for: "
"""Message of gloo before it aborts. Depending on the resolver's answer, gloo may crash without
it."""
_IN_HOROVODS_INIT = re.compile(rb'horovod/common/basics\.py", line \d+ in init')
_NEEDS_LIBRARY = re.compile(
    r"requires? (?:the )?`?([\w-]+)`? library but it was not found|requires `?([\w-]+)[^\n]{0,60}`pip "
    r"install",
    re.IGNORECASE,
)
_NO_METRIC = re.compile(
    r"conditioned on metric `?([\w/.-]+)`? which is not available"
    r"|ModelCheckpoint\(monitor='([\w/.-]+)'\)` could not find"
)
_NO_KEY = re.compile(r"Key '([\w.]+)' is not in struct|Could not override '([\w.]+)'")
_NO_FILE = re.compile(
    r"unable to open file: name = '([^']+)', errno = 2|Unable to find '([^'\n]+)'"
    r"|Checkpoint file not found: (\S+?)(?:\s|$)|\}\} (/\S+); No such file or directory"
    r"|Failed to find any matching files for (\S+)|Directory (/?\S+) not found"
    r"|File not found: filepath=(\S+?)\.?(?:\s|$)"
)
_NO_USERS_FILE = (
    "/multiprocessing/shared_memory.py",
    "/multiprocessing/synchronize.py",
    "/multiprocessing/connection.py",
    "/torch/multiprocessing/",
    "/shutil.py",
    "/subprocess.py",
    "/tempfile.py",
)
"""Parts of the paths of modules that handle files which no user has named."""
_STORE_COUNT = re.compile(r"world_size=(\d+), worker_count=(\d+)")


def missing_main_module(failure: Failure) -> str | None:
    """Return what to do if ``python -m`` did not find its module."""
    name = failure.evidence.main_module
    if name is None:
        return None
    if "cannot be directly executed" in failure.lower:
        return f"{name} has no module __main__: name the module in it that is to run"
    return _missing(name, failure.python, folder=f"the working directory ({Opt.WORKDIR})")


def not_python(failure: Failure) -> str | None:
    """Return what to do if Python was given a shell script or a binary."""
    if not _is_no_python(failure.evidence):
        return None
    return f"is this no Python program? {Opt.NO_PYTHON} runs it as it is (it must be executable)"


def question(failure: Failure) -> str | None:
    """Return what to do if a debugger or ``input()`` found no stdin."""
    evidence = failure.evidence
    if failure.world_size < 2:
        return None
    one, or_gpu = Opt.NUM_PROCS(1), Opt.NUM_GPUS(1)
    sizes = one if one == or_gpu else f"{one} (or {or_gpu})"
    alone = f"one worker alone on a terminal has the terminal: {sizes}"
    if evidence.exception_type == "EOFError":
        if evidence.message != "EOF when reading a line":
            return None
        return (
            "it asked a question, and workers have no stdin: answer it with an option or a "
            f"variable; {alone}"
        )
    debugged = (
        b"(Pdb) " in evidence.end.stderr_tail[-4096:]
        if evidence.exception_type is None
        else evidence.exception_type == "bdb.BdbQuit"
    )
    return f"a debugger found no input: remove the breakpoint; {alone}" if debugged else None


def dashes(failure: Failure) -> str | None:
    """Return what to do if the script's parser refused the ``--`` in front of its arguments."""
    refused = failure.evidence.repeats == "usage error" or _NOT_THE_SCRIPTS.search(
        failure.evidence.message or ""
    )
    if not failure.dashes_first or not refused:
        return None
    return (
        "the script got `--` as its first argument, and its own parser took it: leave out the "
        f"`--` behind {Opt.SCRIPT}"
    )


def unknown_option(failure: Failure) -> str | None:
    """Return where an option belongs that the script does not know."""
    refused = _NOT_THE_SCRIPTS.search(failure.evidence.message or "")
    if refused is None:
        return None
    said = refused[1].replace("--local-rank", "--local_rank")
    if failure.adds_local_rank and "--local_rank=" in said:
        return f"{Opt.OPT('local-rank=off')} leaves it out: {LOCAL_RANK_TOO}"
    absent = _NO_OPTIONS | option_names().absent
    ours = {
        name.replace("_", "-"): name
        for name in map(name_of, sorted(fields_of(TrainOptions).keys() - absent))
    }
    words = re.findall(r"(?:--|^')([a-z][\w-]+)", refused[1])
    written = (f"--{word.replace('_', '-')}" for word in words)
    name = next((ours[word] for word in written if word in ours), None)
    if name is None:
        return None
    return (
        f"distlaunch has an option {name}, which goes before {Opt.SCRIPT}: what follows "
        f"{Opt.SCRIPT} is "
        "the script's own"
    )


def missing_module(evidence: FailureEvidence) -> str | None:
    """Return the name of the module whose absence ended the worker, if it can be installed."""
    if evidence.main_module is not None:
        return evidence.main_module
    name = _module_of(evidence)
    return None if name is None or name.partition(".")[0] in _OWN_NAMES else name


def missing_module_of_own_package(failure: Failure) -> str | None:
    """Return what to do if the missing module is a package of the user's own repository."""
    name = _module_of(failure.evidence)
    top = name.partition(".")[0] if name else ""
    if top not in _OWN_NAMES:
        return None
    root = package_root(top, failure.calls, deep=True) or "ROOT"
    where = "" if root != "ROOT" else ", where ROOT is its folder"
    return (
        f"{top} is a package of your repository, which Python does not search: start the script "
        f"from the repository's root with -m, or set PYTHONPATH={root} ({Opt.ENV}){where}"
    )


def missing_module_of_script(failure: Failure) -> str | None:
    """Return what to do if the interpreter does not have a module."""
    name = _module_of(failure.evidence)
    if name is None:
        return None
    hint = _missing(name, failure.python, folder=_OF_SCRIPT)
    top = name.partition(".")[0]
    root = package_root(top, failure.calls, deep=False)
    if root is None:
        return hint
    return f"{hint}. If it is the script's own package, set PYTHONPATH={root} ({Opt.ENV})"


def missing_distribution(failure: Failure) -> str | None:
    """Return what to do if the metadata of a package are missing."""
    package = re.search(r"no package metadata was found for ([\w.-]+)", failure.lower)
    if package is None:
        return None
    python = failure.python or _ANY_PYTHON
    return f"a library needs the package {package[1]}: {python} -m pip install {package[1]}"


def removed_from_numpy(failure: Failure) -> str | None:
    """Return what to do about a name that NumPy no longer has."""
    found = re.search(r"module 'numpy' has no attribute '(\w+)'", failure.text)
    if found is None or found[1] not in _NOT_IN_NUMPY:
        return None
    return (
        f"the installed NumPy no longer has np.{found[1]}: change the script, or install an "
        'older NumPy (pip install "numpy<2")'
    )


def gpu_memory_of_another(failure: Failure) -> str | None:
    """Return what to do if another process holds memory of the GPU."""
    other = other_process(failure.text)
    if other is None:
        return None
    return (
        f"GPU memory is full, and process {other.pid} holds {other.holds} of it: end it, or if it "
        "is another rank, call torch.cuda.set_device(LOCAL_RANK) first, so that each has its own"
    )


def no_address(failure: Failure) -> str | None:
    """Return what to do if gloo finds no address for the machine's own name."""
    found = re.search(r"Unable to find (?:address|interface) for: ([^\s,]+)", failure.text)
    if found is None:
        return None
    name = found[1].rstrip(".")
    return (
        f"gloo finds no address of this machine by the name {name}: see `getent hosts {name}` "
        "there, or set GLOO_SOCKET_IFNAME to the interface of the nodes' network"
    )


def port_of_the_job(failure: Failure) -> str | None:
    """Return what to do if the port in use is the job's own, on which rank 0 listens for all
    workers."""
    port, rank = failure.master_port, failure.evidence.end.rank
    if not port or not re.search(rf"\b{port}\b", failure.lower):
        return None
    own = f"port {port} is this job's own (MASTER_PORT)"
    if rank:
        return (
            f"{own}, and rank 0 listens on it: rank {rank} tried to, as the script gives every "
            "worker rank 0; use RANK"
        )
    if failure.world_size > 1:
        return (
            f"{own}: does the script give another worker rank 0, or does rank 0 open the port "
            "twice?"
        )
    return f"{own}: does the script open it twice?"


def port_of_the_script(failure: Failure) -> str:
    """Return what to do about a port that the script chose itself."""
    port = port_in(failure.text)
    taken = (
        f"{'the port' if port is None else f'port {port}'} is taken: `ss -ltnp` names the process"
    )
    if failure.world_size > 1 and (port is None or failure.master_port):
        return (
            f"{taken}. The ranks of a node need different ports: add LOCAL_RANK to the script's "
            "own, or let port 0 give a free one"
        )
    return taken


def has_too_many_workers(failure: Failure) -> bool:
    """Return whether more workers have reached the barrier of a store than the job has."""
    found = _STORE_COUNT.search(failure.text)
    return found is not None and int(found[2]) > int(found[1])


def full_disk(failure: Failure) -> str:
    """Return what to do about a full disk."""
    path = path_in(failure.text)
    if path is None:
        return "a disk is full (or its inodes): `df -h` and `df -i` where this file lies"
    return f"the disk of {path} is full (or its inodes): see `df -h` and `df -i` there"


def existing_file(failure: Failure) -> str | None:
    """Return what to do about a file or folder that several ranks create."""
    path = path_in(failure.text)
    if path is None:
        return None
    return (
        f"{path} was there already, from another rank or an earlier run: use "
        "os.makedirs(..., exist_ok=True), or make it on rank 0 alone"
    )


def needs_library(failure: Failure) -> str | None:
    """Return what to do if a library asks for another one that is not installed."""
    found = _NEEDS_LIBRARY.search(failure.text)
    if found is None:
        return None
    return (
        f"a library needs {found[1] or found[2]}: install it for the workers' Python (pip "
        f"install), or choose another interpreter with {Opt.PYTHON}"
    )


def missing_metric(failure: Failure) -> str | None:
    """Return what to do if Lightning does not find the metric that a callback follows."""
    found = _NO_METRIC.search(failure.text)
    if found is None:
        return None
    name = found[1] or found[2]
    return (
        f'the metric {name} was not logged: call self.log("{name}", ...) in the hook that the '
        "callback or scheduler follows, with sync_dist=True"
    )


def missing_key(failure: Failure) -> str | None:
    """Return what to do about a key that a configuration of OmegaConf or Hydra does not have."""
    found = _NO_KEY.search(failure.text)
    if found is None:
        return None
    key = found[1] or found[2]
    return (
        f"the configuration has no {key}: name it in the file, or add it on the command line with "
        f"+{key}=VALUE"
    )


def missing_command(failure: Failure) -> str | None:
    """Return what to do if a command that the script starts is not found."""
    if failure.type != "FileNotFoundError" or not failure.in_call(
        "/subprocess.py", "_execute_child"
    ):
        return None
    name = path_in(failure.text)
    if name is None:
        return None
    return (
        f"the command {name} is not found: it must be in the PATH of the workers on each node "
        f"({Opt.SETUP}, {Opt.ENV} PATH)"
    )


def missing_file(failure: Failure) -> str | None:
    """Return what to do about a file or folder that is not there."""
    if any(failure.in_call(part) for part in _NO_USERS_FILE):
        return None
    found = _NO_FILE.search(failure.text)
    path = path_in(failure.text) if "[errno 2]" in failure.lower else None
    path = path or (next(filter(None, found.groups())) if found else None)
    if path is None or path.startswith(("/dev/shm", "/proc/")):  # noqa: S108 - only compared
        return None
    if path.startswith("/"):
        where = "all nodes must see it (a shared file system, a mount of the container)"
    else:
        where = f"a relative path begins in the workers' directory ({Opt.WORKDIR})"
    return f"{path} is not there on this node: {where}, and a folder to write to must be made first"


def read_only(failure: Failure) -> str:
    """Return what to do about a file system that is mounted read-only."""
    path = path_in(failure.text)
    return (
        f"the file system{f' of {path}' if path else ''} is mounted read-only on this node: write "
        "elsewhere, such as to a folder that all nodes share; caches move with HF_HOME, "
        f"TORCH_HOME, TRITON_CACHE_DIR, TMPDIR ({Opt.ENV})"
    )


def no_permission(failure: Failure) -> str | None:
    """Return what to do about a file that the workers' user may not use."""
    if "[errno 13] permission denied" not in failure.lower and (
        "[errno 1] operation not permitted" not in failure.lower
    ):
        return None
    path = path_in(failure.text)
    if path is None:
        return None
    return (
        f"the workers' user may not use {path}: see `id` and `ls -ld` of it and its folder on this "
        "node; in a container, user and mounts differ"
    )


def broken_file_system(failure: Failure) -> str:
    """Return what to do about a file system that answers with errors."""
    path = path_in(failure.text)
    return (
        f"the file system{f' of {path}' if path else ''} is out of order on this node: see `dmesg "
        f"-T` and `df -h` there; leave the node out ({Opt.EXCLUDE}) until it is mounted anew"
    )


def horovod_without_address(failure: Failure) -> str | None:
    """Return what to do if Horovod crashed because the machine's own name has no address."""
    end = failure.evidence.end
    has_no_address = end.returncode == -11 or (
        end.returncode == -6 and _NO_ADDRESS in end.stderr_tail
    )
    if not has_no_address or not _IN_HOROVODS_INIT.search(end.stderr_tail):
        return None
    return (
        "Horovod crashes where a machine's own name has no address: see `getent hosts "
        "$(hostname)` there"
    )


def unhandled_signal(failure: Failure) -> str | None:
    """Return what to do if a signal arrived before the script had set its handler."""
    code = failure.evidence.end.returncode
    name = signal_name(-code) if code < 0 else ""
    if name not in ("SIGUSR1", "SIGUSR2"):
        return None
    return (
        f"the worker had no handler for {name}, which ends a process without one: install it "
        "first, before imports and init_process_group, which take time"
    )


def aborted_at_exit(failure: Failure) -> bool:
    """Return whether threads of torch that still ran at exit aborted the process."""
    return crashed_somewhere(failure) and (
        failure.evidence.end.returncode == -6 and _AT_EXIT in failure.evidence.end.stderr_tail
    )


def crashed_somewhere(failure: Failure) -> bool:
    """Return whether SIGABRT or SIGSEGV ended the worker and nothing shows where."""
    evidence = failure.evidence
    return (
        evidence.end.returncode in (-6, -11)
        and evidence.frame is None
        and evidence.exception_type is None
    )


def crashed_in_a_call(failure: Failure) -> bool:
    """Return whether native code crashed in a known line of Python."""
    evidence = failure.evidence
    return (
        evidence.end.returncode in (-6, -11)
        and evidence.frame is not None
        and evidence.exception_type is None
    )


def _module_of(evidence: FailureEvidence) -> str | None:
    if evidence.repeats != "import error":
        return None
    name = re.search(
        r"no module named '?([\w.]+)", f"{evidence.message or ''}\n{evidence.text}", re.IGNORECASE
    )
    return name[1] if name else None


def _missing(name: str, python: str | None, *, folder: str) -> str:
    """Return the hint for a module that is neither installed nor in ``folder``."""
    start = f"{python or _ANY_PYTHON} has no module {name}, nor has {folder}: is the name right?"
    package, dot, _ = name.rpartition(".")
    if dot and folder == _OF_SCRIPT:
        # Python names the first module that it does not find, so it has found the package.
        return f"{start} {package} is there, perhaps in another version than the script needs"
    return f"{start} If so, install it for that interpreter, or choose another with {Opt.PYTHON}"


def _is_no_python(evidence: FailureEvidence) -> bool:
    """Return whether Python was given a shell script or a binary, by the file's name, the source
    line and the error."""
    file = (evidence.frame or "").partition(" in ")[0].rpartition(":")[0]
    if file.endswith((".sh", ".bash", ".zsh", ".ksh")):
        return True
    if evidence.repeats != "syntax error" or file.endswith(".py"):
        return False
    return (evidence.message or "").startswith(_NO_SOURCE) or any(
        line.lstrip().startswith("#!") and "sh" in line for line in evidence.excerpt
    )
