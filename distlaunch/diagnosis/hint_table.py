"""The table of hints: how a kind of failure is recognised, and what the user can do.

The first row that matches gives the hint, so a specific row must precede every row whose words also
occur in its failures. For example, a full /dev/shm precedes full disks, and the message of one GPU
error precedes the advice that torch adds to all GPU errors. Each row has texts of real failures,
and near misses, in ``tests/data/hints``.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from distlaunch.core.model.option_names import Opt
from distlaunch.diagnosis import special_hints as special
from distlaunch.diagnosis.failure_kinds import Failure, FailureKind
from distlaunch.diagnosis.file_hints import FILE_ROWS, SPECIFIC_FILE_ROWS
from distlaunch.diagnosis.hint_row import HintRow
from distlaunch.diagnosis.library_hints import LIBRARY_ROWS, SPECIFIC_LIBRARY_ROWS
from distlaunch.diagnosis.model_hints import MODEL_ROWS, SPECIFIC_MODEL_ROWS
from distlaunch.diagnosis.resources import is_fragmented

K = FailureKind
_RENAMES_OR_REMOVES = (
    r"\n    [^\n]*(?:\bos\.(?:remove|unlink|rename|replace|rmdir)|\.(?:unlink|rmdir))\([^\n]*\n"
    r"(?: +[\^~]+\n)?FileNotFoundError: "
)
_SHARED = "/dev/shm/"  # noqa: S108 - looked for in an error, and not opened


def _in_backward(failure: Failure) -> bool:
    return failure.in_call("/torch/autograd/", "backward", "_engine_run_backward") or (
        failure.in_call("/torch/", "run_backward")
    )


def _is_about_shared_memory(failure: Failure) -> bool:
    return _SHARED in failure.text or any(
        failure.in_call(file)
        for file in (
            "/multiprocessing/synchronize.py",
            "/multiprocessing/shared_memory.py",
            "/multiprocessing/heap.py",
            "/torch/multiprocessing/reductions.py",
        )
    )


def _names_shared_memory(failure: Failure) -> bool:
    return failure.in_call("/multiprocessing/shared_memory.py")


def _is_fragmented(failure: Failure) -> bool:
    return is_fragmented(failure.text)


def _has_others(failure: Failure) -> bool:
    return failure.world_size > 1


def _has_other_nodes(failure: Failure) -> bool:
    return failure.nodes > 1


def _removes_files(failure: Failure) -> bool:
    inside = ("_rmtree_safe_fd", "_rmtree_safe_fd_step", "_rmtree_unsafe")
    names = ("rmtree", *inside) if "[errno 39]" in failure.lower else inside
    return failure.world_size > 1 and failure.in_call("/shutil.py", *names)


def _renames_or_removes(failure: Failure) -> bool:
    last = failure.output.rpartition("Traceback (most recent call last)")[2]
    return failure.world_size > 1 and (
        "' -> '" in failure.text or re.search(_RENAMES_OR_REMOVES, last) is not None
    )


def _asks_for_lock(failure: Failure) -> bool:
    last = failure.output.rpartition("Traceback (most recent call last)")[2]
    return re.search(r"\b(?:flock|lockf)\(", last) is not None


def _in_fork(failure: Failure) -> bool:
    return any(
        failure.in_call(file)
        for file in ("/multiprocessing/popen_fork.py", "/subprocess.py", "<frozen os>")
    )


def _reads_checkpoint(failure: Failure) -> bool:
    """Return whether ``torch.load`` failed without a message while it read the file."""
    return failure.evidence.message is None and any(
        failure.in_call(file)
        for file in ("/torch/serialization.py", "/torch/_weights_only_unpickler.py")
    )


def _opens_checkpoint(failure: Failure) -> bool:
    """Return whether ``torch.load`` failed while it opened the file."""
    return failure.in_call("/torch/serialization.py", "__init__") and failure.in_call(
        "/torch/serialization.py", "load"
    )


def _reads_environment(failure: Failure) -> bool:
    last = failure.calls[-1] if failure.calls else None
    return (
        last is not None
        and last.function == "__getitem__"
        and last.file.endswith(("<frozen os>", "/os.py"))
    )


def _of_lightning(failure: Failure) -> bool:
    return failure.in_call("/strategies/", "root_device") and any(
        part in call.file for call in failure.calls for part in ("lightning",)
    )


def _has_file_store(failure: Failure) -> bool:
    last = failure.output.rpartition("Traceback (most recent call last)")[2]
    return "file://" in last and failure.in_call("/torch/distributed/", "init_process_group")


def _in_worker_of_loader(failure: Failure) -> bool:
    return failure.evidence.loader_may_be_gone and failure.evidence.end.returncode == 1


def _child_crashed(failure: Failure) -> bool:
    return failure.evidence.child_crashed


def _no_child_crashed(failure: Failure) -> bool:
    return not failure.evidence.child_crashed


def _ended_with(*codes: int) -> Callable[[Failure], bool]:
    return lambda failure: failure.evidence.end.returncode in codes


_LESS_GPU_MEMORY = (
    "Use a smaller micro-batch with gradient accumulation, activation checkpointing or FSDP"
)
_MORE_SHM = (
    "See `df -h /dev/shm` on the node; give a container more (docker --shm-size, --ipc=host), use "
    "fewer loader workers, or remove what killed jobs have left there"
)
_INTERFACES = "`ip -br address` lists the interfaces of a node"

_STARTS: tuple[HintRow, ...] = (
    HintRow(kind=K.MODULE, hint=special.missing_main_module),
    HintRow(kind=K.NOT_PYTHON, hint=special.not_python),
    HintRow(
        kind=K.QUESTION,
        hint=(
            "the repository of the model holds code of its own, and nobody can confirm in a "
            "worker that it may run: pass trust_remote_code=True if you trust it"
        ),
        marks=("trust_remote_code=true` to",),
    ),
    HintRow(
        kind=K.QUESTION,
        hint=(
            "Weights & Biases has no key, and nobody can type it in a worker: set WANDB_API_KEY or "
            "WANDB_MODE=offline for the workers ({Opt.ENV})"
        ),
        marks=("api_key not configured (no-tty)",),
    ),
    HintRow(kind=K.QUESTION, hint=special.question),
    HintRow(kind=K.OPTION, hint=special.dashes),
    HintRow(kind=K.OPTION, hint=special.unknown_option),
    HintRow(
        kind=K.OPTION,
        hint=(
            "the local rank is no option of a worker: let the script read it with "
            'int(os.environ["LOCAL_RANK"])'
        ),
        marks=("--local_rank", "--local-rank"),
        pattern=r"arguments are required: [^\n]*--local[-_]rank\b",
    ),
    HintRow(
        kind=K.OPTION,
        hint=(
            "the local rank is no option of a worker: let the script read it with "
            'int(os.environ["LOCAL_RANK"])'
        ),
        marks=("object has no attribute 'local_rank'",),
        pattern=r"'Namespace' object has no attribute 'local_rank'",
    ),
)

_IMPORTS: tuple[HintRow, ...] = (
    HintRow(
        kind=K.MODULE,
        hint=(
            "a file {name}.py of the script's folder hides the package {name}: give that file "
            "another name"
        ),
        marks=("is not a package",),
        pattern=r"No module named '(?P<name>[\w]+)\.[\w.]+'; '\1' is not a package",
    ),
    HintRow(kind=K.MODULE, hint=special.missing_module_of_own_package),
    HintRow(kind=K.MODULE, hint=special.missing_module_of_script),
    HintRow(kind=K.MODULE, hint=special.missing_distribution),
    HintRow(
        kind=K.OLD_NAME,
        hint=(
            "the installed {library} has no {name}: change the script, or install the version "
            "of {library} that it was written for"
        ),
        marks=("cannot import name",),
        pattern=(
            r"cannot import name '(?P<name>[^']+)' from '(?P<library>\w+)[\w.]*' "
            r"\([^)]*/(?:site|dist)-packages/"
        ),
    ),
    HintRow(
        kind=K.OLD_NAME,
        hint=(
            "the {what} of the installed library takes no {name}: change the script, or install "
            "the version of the library that it was written for"
        ),
        marks=("got an unexpected keyword argument",),
        types=("TypeError",),
        pattern=(
            r"(?P<what>\w*Trainer|\w*TrainingArguments)\.__init__\(\) got an unexpected keyword "
            r"argument '(?P<name>\w+)'"
        ),
    ),
    HintRow(
        kind=K.OLD_NAME,
        hint=(
            "NumPy 2 has no np.{name}: change the script, or install an older NumPy (pip "
            'install "numpy<2")'
        ),
        marks=("was removed in the numpy 2",),
        pattern=r"`np\.(?P<name>\w+)` was removed in the NumPy 2",
    ),
    HintRow(
        kind=K.OLD_NAME,
        hint=(
            "NumPy 1.24 and newer have no np.{name}: change the script to {name}, or install an "
            'older NumPy (pip install "numpy<1.24")'
        ),
        marks=("was a deprecated alias for the builtin",),
        pattern=r"`np\.(?P<name>\w+)` was a deprecated alias for the builtin",
    ),
    HintRow(kind=K.OLD_NAME, hint=special.removed_from_numpy, marks=("module 'numpy' has no",)),
    HintRow(
        kind=K.BINARY,
        hint=(
            "an extension was built for NumPy 1, and NumPy 2 is installed: install a newer "
            'version of the extension, or an older NumPy (pip install "numpy<2")'
        ),
        marks=("_array_api not found", "compiled using numpy 1.x cannot be run in"),
        in_output=True,
        when=lambda failure: any(
            word in failure.lower
            for word in ("_array_api not found", "multiarray failed to import")
        ),
    ),
    HintRow(
        kind=K.BINARY,
        hint=(
            "an extension was built against another version of its library: rebuild or reinstall it"
        ),
        marks=("undefined symbol", "size changed, may indicate binary incompatibility"),
    ),
    HintRow(
        kind=K.BINARY,
        hint=(
            "the system's C library is older than the one that this file was built for: use a "
            "newer image or system, or a build for this one (GLIBC {version})"
        ),
        marks=("version `glibc_",),
        pattern=r"version `GLIBC_(?P<version>[\d.]+)' not found",
    ),
    HintRow(
        kind=K.BINARY,
        hint=(
            "an older libstdc++ was loaded before the one that this file needs: put the "
            "environment's lib folder first in LD_LIBRARY_PATH ({Opt.ENV}), or load a newer "
            "compiler module with {Opt.SETUP}"
        ),
        marks=("version `glibcxx_", "version `cxxabi_"),
    ),
    HintRow(
        kind=K.GPU_DRIVER,
        hint=(
            "no GPU driver is visible here: see `nvidia-smi` on the node, and start a container "
            "with access to GPUs (docker --gpus all)"
        ),
        marks=("libcuda.so.1: cannot open shared object file",),
    ),
    HintRow(
        kind=K.BINARY,
        hint=(
            "a shared library is not found: is the environment loaded ({Opt.SETUP}), "
            "LD_LIBRARY_PATH "
            "set for workers?"
        ),
        marks=("cannot open shared object file",),
        types=("ImportError", "OSError", "RuntimeError", "ModuleNotFoundError", ""),
    ),
    HintRow(
        kind=K.VARIABLE,
        hint=(
            "the variable {name} is not set for the workers: set it where the launcher starts, or "
            "with {Opt.ENV}"
        ),
        types=("KeyError",),
        pattern=r"KeyError: '(?P<name>\w+)'",
        when=_reads_environment,
    ),
    HintRow(
        kind=K.VARIABLE,
        hint=(
            "the variable {name} is not set for the workers: set it where the launcher starts, or "
            "with {Opt.ENV}"
        ),
        marks=("environment variable",),
        pattern=(
            r"environment variable:? ['\"`$]*(?-i:(?P<name>[A-Z][A-Z0-9_]{2,}))['\"`]* "
            r"(?:is |was )?(?:not (?:set|found|defined)|missing|unset|undefined|required)"
        ),
    ),
    HintRow(
        kind=K.VARIABLE,
        hint=(
            "the variable {name} is not set for the workers: set it where the launcher starts, or "
            "with {Opt.ENV}"
        ),
        marks=("environment variable",),
        pattern=(
            r"(?-i:(?P<name>[A-Z][A-Z0-9_]{2,}))['\"`]* environment variable "
            r"(?:is |was |must be |has to be )(?:not )?(?:set|defined|missing|unset|undefined)"
        ),
    ),
    HintRow(
        kind=K.VARIABLE,
        hint=(
            "the variable {name} is not set for the shell script: set it where the launcher starts "
            "(with export), or with {Opt.ENV}"
        ),
        marks=("unbound variable", "parameter not set"),
        pattern=r"\b(?P<name>[A-Za-z_]\w*): (?:unbound variable|parameter not set)",
    ),
    HintRow(
        kind=K.DOWNLOAD,
        hint=(
            "the model or data set is for members only: accept its terms on the hub, and set "
            "HF_TOKEN for the workers ({Opt.ENV})"
        ),
        marks=("cannot access gated repo", "you are trying to access a gated repo"),
    ),
    HintRow(
        kind=K.DOWNLOAD,
        hint=(
            "this node does not reach the server: fetch the files before the job, to a folder that "
            "all nodes share, and set HF_HUB_OFFLINE=1 for the workers ({Opt.ENV})"
        ),
        marks=("couldn't connect to 'https://huggingface.co'",),
    ),
    HintRow(
        kind=K.DOWNLOAD,
        hint=(
            "this node does not reach {host}: fetch the files before the job, to a folder that all "
            "nodes share"
        ),
        marks=("max retries exceeded with url",),
        pattern=(
            r"host='(?P<host>[^']+)'[^\n]*Max retries exceeded with url[^\n]*"
            r"(?:NameResolutionError|Name or service|name resolution|unreachable|timed out|refused)"
        ),
    ),
)

_LIMITS: tuple[HintRow, ...] = (
    HintRow(
        kind=K.THREADS,
        hint=(
            "a limit of threads or memory is reached: see `ulimit -u`, `ulimit -v`, pids.max of the "
            "cgroup, and `free -h`"
        ),
        marks=(
            "cannot start the worker (fork): resource temporarily unavailable",
            "can't start new thread",
        ),
    ),
    HintRow(
        kind=K.THREADS,
        hint=(
            "OpenBLAS could not start its threads: set OPENBLAS_NUM_THREADS=1 for the workers "
            "({Opt.ENV}), or raise `ulimit -u` and pids.max of the cgroup"
        ),
        marks=("openblas blas_thread_init: pthread_create",),
        in_output=True,
        types=("", "KeyboardInterrupt", "ImportError"),
    ),
    HintRow(
        kind=K.THREADS,
        hint=(
            "OpenMP could not start its threads: set OMP_NUM_THREADS=1 for the workers "
            "({Opt.ENV}), "
            "or raise `ulimit -u` and pids.max of the cgroup"
        ),
        marks=("libgomp: thread creation failed", "allocate necessary resources for omp thread"),
        in_output=True,
        types=("",),
    ),
    HintRow(
        kind=K.SAME_FILE,
        hint=(
            "another process has this HDF5 file open, or its file system gives out no locks: "
            "open it with mode 'r' in all ranks and write on rank 0 alone; without locks set "
            "HDF5_USE_FILE_LOCKING=FALSE ({Opt.ENV})"
        ),
        marks=("unable to lock file", "unable to truncate a file which is already open"),
    ),
    HintRow(
        kind=K.THREADS,
        hint=(
            "no process can be started: a limit is reached; see `ulimit -u` and pids.max of the "
            "cgroup"
        ),
        marks=("[errno 11] resource temporarily unavailable",),
        when=_in_fork,
    ),
    HintRow(
        kind=K.COMMAND,
        hint=(
            "it was there when the job was planned: has it been removed, or its file system "
            "unmounted?"
        ),
        marks=("distlaunch: cannot enter the working directory",),
    ),
    HintRow(
        kind=K.OPEN_FILES,
        hint="the limit of open files is reached: see `ulimit -n`",
        marks=("cannot start the worker (pipe)",),
    ),
    HintRow(
        kind=K.OPEN_FILES,
        hint=(
            "raise the limit (`ulimit -n`), or "
            "torch.multiprocessing.set_sharing_strategy('file_system')"
        ),
        marks=("too many open files", "received 0 items of ancdata"),
    ),
    HintRow(
        kind=K.SOCKET_PATH,
        hint=(
            "the path of a socket may have 107 characters, and Python makes it in TMPDIR: set a "
            "short one for the workers, such as TMPDIR=/tmp ({Opt.ENV})"
        ),
        marks=("af_unix path too long",),
        in_output=True,
        types=("OSError", "EOFError", "error"),
    ),
)

_MEMORY: tuple[HintRow, ...] = (
    HintRow(
        kind=K.SHARED_MEMORY,
        hint=(
            "mostly /dev/shm{shm} was too small for the data loader's worker, or a file that it "
            f"maps was cut. {_MORE_SHM}"
        ),
        marks=("is killed by signal: bus error",),
        pattern=r"DataLoader worker \(pid",
    ),
    HintRow(
        kind=K.LOADER,
        hint=(
            "the data loader's worker was killed, mostly for lack of host memory: `dmesg -T` "
            "tells; use fewer loader workers (num_workers) or smaller caches"
        ),
        marks=("is killed by signal: killed",),
        pattern=r"DataLoader worker \(pid",
    ),
    HintRow(
        kind=K.LOADER,
        hint=(
            "native code crashed in the data loader's worker: num_workers=0 runs the data set "
            "in the rank itself, whose crash is reported with its line"
        ),
        marks=(
            "is killed by signal: segmentation fault",
            "is killed by signal: aborted",
            "is killed by signal: floating point exception",
            "is killed by signal: illegal instruction",
        ),
        pattern=r"DataLoader worker \(pid",
    ),
    HintRow(
        kind=K.LOADER,
        hint=(
            "a data loader's worker ended without a traceback: num_workers=0 shows an error of "
            "the data set; an out-of-memory kill is in `dmesg -T`"
        ),
        marks=("exited unexpectedly", "is killed by signal: "),
        pattern=r"DataLoader worker \(pid",
    ),
    HintRow(
        kind=K.SHARED_MEMORY,
        hint="shared memory (/dev/shm{shm}) is full. " + _MORE_SHM,
        marks=(
            "insufficient shared memory",
            "unable to allocate shared memory",
        ),
    ),
    HintRow(
        kind=K.SHARED_MEMORY,
        hint="shared memory (/dev/shm{shm}) is full. " + _MORE_SHM,
        marks=("unable to write to file </torch_",),
    ),
    HintRow(
        kind=K.SHARED_MEMORY,
        hint="NCCL found /dev/shm{shm} full. " + _MORE_SHM,
        marks=(
            "error while creating shared memory segment",
            "failed to extend /dev/shm/nccl-",
            "call to posix_fallocate failed : no space left on device",
        ),
        pattern=r"nccl",
    ),
    HintRow(
        kind=K.SHARED_MEMORY,
        hint="shared memory (/dev/shm{shm}) is full. " + _MORE_SHM,
        marks=("no space left on device",),
        when=_is_about_shared_memory,
    ),
    HintRow(
        kind=K.HOST_MEMORY,
        hint=(
            "Ray ended the task because the memory of the node's host is nearly full: "
            "start fewer tasks on a node, or smaller ones; RAY_memory_usage_threshold sets the "
            "limit"
        ),
        marks=("due to the node running low on memory", "rayoutofmemoryerror"),
    ),
    HintRow(
        kind=K.GPU_KERNEL,
        hint=(
            "a Triton kernel needs more {resource} than this GPU has for one block: choose "
            "smaller block sizes or fewer num_stages"
        ),
        marks=("out of resource: ",),
        pattern=r"out of resource: (?P<resource>[a-z ]+?),? ?Required",
    ),
    HintRow(
        kind=K.GPU_MEMORY,
        hint=special.gpu_memory_of_another,
        marks=("out of memory",),
    ),
    HintRow(
        kind=K.GPU_MEMORY,
        hint=(
            "GPU memory is full, and much of it is free in pieces: set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True for the workers ({Opt.ENV}). "
            f"{_LESS_GPU_MEMORY}"
        ),
        marks=("out of memory",),
        when=_is_fragmented,
    ),
    HintRow(
        kind=K.GPU_MEMORY,
        hint=(
            "GPU memory is full in backward, where the activations of all layers are held. "
            f"{_LESS_GPU_MEMORY}"
        ),
        marks=("cuda out of memory", "hip out of memory"),
        when=_in_backward,
    ),
    HintRow(
        kind=K.GPU_MEMORY,
        hint=(
            "GPU memory is full: NCCL found none beside that of the model. Leave it some "
            f"hundred MiB. {_LESS_GPU_MEMORY}"
        ),
        marks=("'out of memory'", "failed to cuda calloc", "failed to cuda malloc"),
        pattern=r"nccl",
    ),
    HintRow(
        kind=K.GPU_MEMORY,
        hint=(
            "GPU memory is full: cuBLAS or cuDNN found none beside that of the model. "
            f"{_LESS_GPU_MEMORY}"
        ),
        marks=(
            "cublas_status_alloc_failed",
            "cudnn_status_alloc_failed",
            "device_allocation_failed",
        ),
    ),
    HintRow(
        kind=K.GPU_MEMORY,
        hint=(
            f"GPU memory is full. {_LESS_GPU_MEMORY}; `nvidia-smi` shows whether another process "
            "holds some"
        ),
        marks=(
            "cuda out of memory",
            "cuda error: out of memory",
            "cuda driver error: out of memory",
            "hip out of memory",
            "hip error: out of memory",
            "xpu out of memory",
            "triton error [cuda]: out of memory",
            "cuda_error_out_of_memory",
            "cuda runtime error (2) : out of memory",
        ),
    ),
    HintRow(
        kind=K.GPU_MEMORY,
        hint=f"GPU memory is full. {_LESS_GPU_MEMORY}",
        marks=("oom when allocating tensor", "resource_exhausted: out of memory"),
        pattern=r"device:GPU|RESOURCE_EXHAUSTED: Out of memory",
    ),
    HintRow(
        kind=K.HOST_MEMORY,
        hint=(
            "host memory (not GPU memory) could not be had for this tensor: use a smaller batch, "
            "and see whether its shape is the one that is meant"
        ),
        marks=("oom when allocating tensor",),
        pattern=r"device:CPU|allocator (?:cpu|mklcpu)",
    ),
    HintRow(
        kind=K.HOST_MEMORY,
        hint=(
            "host memory (not GPU memory) could not be had in a process of the pool: start fewer "
            "processes, or give each smaller batches; see `free -h` and `ulimit -v`"
        ),
        marks=("memory allocation of ", "cannot allocate memory", "std::bad_alloc"),
        pattern=r"memory allocation of \d+ bytes failed|cannot allocate memory|std::bad_alloc",
        when=_child_crashed,
    ),
    HintRow(
        kind=K.HOST_MEMORY,
        hint=(
            "host memory (not GPU memory) could not be had: see `free -h`, `ulimit -v`; every rank "
            "loads its own copy"
        ),
        marks=("memory allocation of ",),
        pattern=r"memory allocation of \d+ bytes failed",
    ),
    HintRow(
        kind=K.HOST_MEMORY,
        hint=(
            "host memory (not GPU memory) could not be had: see `free -h`, `ulimit -v`; every rank "
            "loads its own copy"
        ),
        marks=(
            "can't allocate memory",
            "cannot allocate memory",
            "defaultcpuallocator: not enough memory",
            "std::bad_alloc",
        ),
    ),
    HintRow(
        kind=K.HOST_MEMORY,
        hint=(
            "host memory (not GPU memory) could not be had: see `free -h`, `ulimit -v`; every rank "
            "loads its own copy"
        ),
        types=("MemoryError", "_ArrayMemoryError"),
    ),
)

_GPUS: tuple[HintRow, ...] = (
    HintRow(
        kind=K.GPU_NUMBER,
        hint=(
            "a rank asks for a GPU that it does not see: torch.cuda.set_device(LOCAL_RANK), no more "
            "workers than GPUs; with {Opt.ISOLATE_GPUS} each sees its own as device 0"
        ),
        marks=("invalid device ordinal",),
    ),
    HintRow(
        kind=K.GPU_NUMBER,
        hint=(
            "a rank uses {one} and {other}: call torch.cuda.set_device(LOCAL_RANK) first, put model "
            'and batch on that device, and give from_pretrained no device_map="auto"'
        ),
        marks=("expected all tensors to be on the same device",),
        pattern=r"(?P<one>cuda:\d+)[^\n]{0,40}? (?:and|different from[^\n]*on) (?P<other>cuda:\d+)",
    ),
    HintRow(
        kind=K.GPU_FAULT,
        hint=(
            "the GPU's memory or link has a fault: `nvidia-smi -q -d ECC` and `dmesg -T` (Xid) "
            "name it; leave that GPU or its node out until it is reset"
        ),
        marks=(
            "uncorrectable ecc error",
            "uncorrectable nvlink error",
            "cuda_error_ecc_uncorrectable",
            "gpu is lost",
            "gpu has fallen off the bus",
        ),
    ),
    HintRow(
        kind=K.GPU_BUSY,
        hint=(
            "another process has the GPU for itself: `nvidia-smi` shows it and the compute mode "
            "(E. Process); each rank needs a GPU of its own: torch.cuda.set_device(LOCAL_RANK)"
        ),
        marks=(
            "cuda-capable devices are busy or unavailable",
            "cuda-capable device(s) is/are busy or unavailable",
        ),
    ),
    HintRow(
        kind=K.GPU_BUILD,
        hint=(
            "this torch build has no kernels for this GPU: compare torch.cuda.get_arch_list() with "
            "the card"
        ),
        marks=("no kernel image is available", "device kernel image is invalid"),
    ),
    HintRow(
        kind=K.GPU_FORK,
        hint=(
            "a process that has used CUDA was forked: start the child with spawn "
            "(multiprocessing_context='spawn'), or keep CUDA out of the data set and out of "
            "what runs before the fork"
        ),
        marks=("cannot re-initialize cuda in forked subprocess",),
    ),
    HintRow(
        kind=K.GPU_DRIVER,
        hint="the GPU driver is missing or too old: compare `nvidia-smi` with torch.version.cuda",
        marks=(
            "found no nvidia driver",
            "no nvidia driver",
            "driver version is insufficient",
            "nvidia driver on your system is too old",
        ),
    ),
    HintRow(
        kind=K.GPU_DRIVER,
        hint=(
            "the driver is not ready: on machines with NVSwitch the service nvidia-fabricmanager "
            "must run, in the driver's version"
        ),
        marks=("error 802: system not yet initialized", "cuda error: system not yet initialized"),
    ),
    HintRow(
        kind=K.GPU_DRIVER,
        hint=(
            "`nvidia-smi` tells whether the driver works; a fork after CUDA was started breaks it "
            "too"
        ),
        marks=("cuda unknown error", "cuda initialization: ", "cuda error: initialization error"),
    ),
    HintRow(
        kind=K.NO_GPU,
        hint=(
            "NCCL needs GPUs, and this worker sees none: on CPUs use "
            'init_process_group("gloo"); {Opt.NUM_PROCS} hides the GPUs, {Opt.NUM_GPUS} does not'
        ),
        marks=(
            "processgroupnccl is only supported with gpus",
            "distributed package doesn't have nccl built in",
        ),
    ),
    HintRow(
        kind=K.NO_GPU,
        hint=(
            "this worker sees no GPU: use a torch build with CUDA, and start one worker per GPU "
            "with {Opt.NUM_GPUS} ({Opt.NUM_PROCS} hides the GPUs)"
        ),
        marks=(
            "torch not compiled with cuda enabled",
            "no cuda gpus are available",
            "no supported gpu backend found",
        ),
    ),
    HintRow(
        kind=K.CHECKPOINT,
        hint=(
            "the checkpoint was saved on a GPU that this worker does not see: "
            'torch.load(..., map_location="cpu"), or map_location of the rank\'s own GPU'
        ),
        marks=("attempting to deserialize object on",),
    ),
    HintRow(
        kind=K.INDEX,
        hint=(
            "an index is outside of the table that is looked up: compare the largest with "
            "num_embeddings (for a language model, len(tokenizer) with the embedding's size)"
        ),
        marks=("index out of range in self", "not in the valid range [0, "),
        when=lambda failure: failure.in_call("/torch/nn/functional.py"),
    ),
    HintRow(
        kind=K.INDEX,
        hint="a label is outside of the classes: labels go from 0 to the number of classes less 1",
        pattern=r"Target -?\d+ is out of bounds",
        marks=("is out of bounds",),
    ),
    HintRow(
        kind=K.INDEX,
        hint=(
            "an index is outside of the table that is looked up on the GPU: compare the largest "
            "with num_embeddings (for a language model, len(tokenizer) with the embedding's size)"
        ),
        marks=("srcindex < srcselectdimsize",),
        in_output=True,
        when=lambda failure: "device-side assert triggered" in failure.lower,
    ),
    HintRow(
        kind=K.INDEX,
        hint="a label is outside of the classes: labels go from 0 to the number of classes less 1",
        marks=("assertion `t >= 0 && t < n_classes` failed",),
        in_output=True,
        when=lambda failure: "device-side assert triggered" in failure.lower,
    ),
    HintRow(
        kind=K.GPU_KERNEL,
        hint=(
            "a kernel found an index or a value out of range: set CUDA_LAUNCH_BLOCKING=1 to see the "
            "line that launched the kernel"
        ),
        marks=("device-side assert triggered",),
    ),
    HintRow(
        kind=K.GPU_KERNEL,
        hint="set CUDA_LAUNCH_BLOCKING=1 to see the line that launched the kernel",
        marks=(
            "an illegal memory access was encountered",
            "unspecified launch failure",
            "misaligned address",
            "an illegal instruction was encountered",
        ),
    ),
    HintRow(
        kind=K.CONVOLUTION,
        hint=(
            "cuDNN found no algorithm for this convolution, mostly for lack of GPU memory: use a "
            "smaller batch; if memory is free, compare the types of input and weights"
        ),
        marks=(
            "unable to find a valid cudnn algorithm",
            "was unable to find an engine to execute this computation",
        ),
    ),
)

_GROUPS: tuple[HintRow, ...] = (
    HintRow(
        kind=K.RANK,
        hint=(
            "{name} is not set in this process: distlaunch sets it for the workers, so a wrapper, "
            "a container or a child process has not passed it on"
        ),
        marks=("expected, but not set",),
        pattern=r"environment variable (?P<name>[A-Z_]+) expected, but not set",
    ),
    HintRow(
        kind=K.RANK,
        hint=(
            "a rank is not below the number of ranks: take them from RANK and WORLD_SIZE, or "
            "from torch.distributed, and not from an option or from LOCAL_RANK"
        ),
        marks=("invalid rank", "rank < size", "invalid root rank", "should be in the interval [0"),
        pattern=(
            r"Invalid rank -?\d+, rank should be in the interval|enforce fail [^\n]*rank < size"
            r"|invalid root rank: -?\d+"
        ),
    ),
    HintRow(
        kind=K.RANK,
        hint=(
            "a group cannot have more ranks than the job: make the ranks of new_group from "
            "WORLD_SIZE"
        ),
        marks=("the new group's world size should be less or equal",),
    ),
    HintRow(
        kind=K.RANK,
        hint=(
            "the Trainer's devices are fewer than the workers of a node: let it take them from "
            'the launcher with devices=int(os.environ["LOCAL_WORLD_SIZE"]) and the right '
            "num_nodes"
        ),
        types=("IndexError",),
        when=_of_lightning,
    ),
    HintRow(
        kind=K.RANK,
        hint=(
            "the Trainer is told {devices} devices and {nodes} nodes, and the job has {workers} "
            "workers: take devices from LOCAL_WORLD_SIZE and num_nodes from GROUP_WORLD_SIZE, or "
            "start that many workers"
        ),
        marks=("does not match the world size (",),
        pattern=(
            r"You set `devices=(?P<devices>\d+)` and `num_nodes=(?P<nodes>\d+)` in Lightning"
            r"[^\n]*the world size \((?P<workers>\d+)\)"
        ),
    ),
    HintRow(
        kind=K.NO_GROUP,
        hint=(
            "this process has not called init_process_group yet: call it (or the toolkit's "
            "init()) before the first collective, and in each process that a script spawns"
        ),
        marks=("default process group has not been initialized",),
    ),
    HintRow(
        kind=K.NO_GROUP,
        hint=(
            "Horovod is not initialized in this process: call hvd.init() before any other function "
            "of Horovod, and in each process that a script spawns"
        ),
        marks=("horovod has not been initialized",),
    ),
    HintRow(
        kind=K.NO_GROUP,
        hint=(
            "the group exists already, as Lightning, Accelerate and DeepSpeed make it "
            "themselves: call init_process_group only if dist.is_initialized() is false"
        ),
        marks=("trying to initialize the default process group twice",),
    ),
    HintRow(
        kind=K.SAME_GPU,
        hint=(
            "two ranks use the same GPU: call torch.cuda.set_device(LOCAL_RANK) before the group is "
            "made"
        ),
        marks=("duplicate gpu detected",),
    ),
    HintRow(kind=K.INTERFACE, hint=special.horovod_without_address),
    HintRow(
        kind=K.INTERFACE,
        hint=(
            "gloo finds no interface {name}: set GLOO_SOCKET_IFNAME to one name that each node "
            f"has, or leave it unset. {_INTERFACES}"
        ),
        marks=("unable to find address for",),
        pattern=r"ifa != nullptr\. Unable to find address for: (?P<name>[^\s,]+)",
    ),
    HintRow(
        kind=K.INTERFACE,
        hint=special.no_address,
        marks=("unable to find address for", "unable to find interface for"),
    ),
    HintRow(
        kind=K.FILE_STORE,
        hint=(
            "the file of the store holds more ranks than the job has, so it is left from an "
            "earlier run: remove it before each start, or leave init_method out (env://)"
        ),
        marks=("store based barrier",),
        when=special.has_too_many_workers,
        tells_why_ranks_did_not_meet=True,
    ),
    HintRow(
        kind=K.FILE_STORE,
        hint=(
            "a file that init_method=file:// names may be left from an earlier run or attempt: "
            "remove it before each start, or leave init_method out (env://)"
        ),
        marks=("wait timeout", "timed out", "connection refused", "connectfullmesh failed"),
        when=_has_file_store,
        tells_why_ranks_did_not_meet=True,
    ),
    HintRow(
        kind=K.INTERFACE,
        hint=(
            "gloo connects by the loopback interface, which other nodes do not reach: set "
            f"GLOO_SOCKET_IFNAME to the interface of the nodes' network. {_INTERFACES}"
        ),
        marks=("connectfullmesh failed",),
        pattern=r"remote=\[(?:127\.\d+\.\d+\.\d+|::1)\]",
        when=_has_other_nodes,
        tells_why_ranks_did_not_meet=True,
    ),
    HintRow(
        kind=K.INTERFACE,
        hint=(
            "gloo could not connect to {address}: let the nodes reach all ports of each other "
            "(firewall), and set GLOO_SOCKET_IFNAME to the interface of their network"
        ),
        marks=("connectfullmesh failed",),
        pattern=r"connectFullMesh failed[^\n]*remote=\[(?P<address>[^\]\s]+)\]",
        when=_has_other_nodes,
    ),
    HintRow(
        kind=K.INTERFACE,
        hint=(
            "NCCL finds no interface that NCCL_SOCKET_IFNAME allows: set it to one that each node "
            f"has, or leave it unset. {_INTERFACES}"
        ),
        marks=("no socket interface found", "is neither af_inet(2) nor af_inet6(10)"),
    ),
    HintRow(
        kind=K.NCCL,
        hint=(
            "the nodes have different versions of NCCL: install the same torch on each, and see "
            "which libnccl LD_LIBRARY_PATH brings in"
        ),
        marks=("mismatched nccl version detected",),
    ),
    HintRow(
        kind=K.NCCL,
        hint=(
            "NCCL cannot connect to {address}: choose the interface of the nodes' network with "
            "NCCL_SOCKET_IFNAME, and let the nodes reach all ports of each other (firewall)"
        ),
        marks=("connect to ",),
        pattern=r"Connect to (?P<address>[^\s<]+)<\d+> failed",
    ),
    HintRow(
        kind=K.NCCL,
        hint=(
            "NCCL could not use the network or shared memory: NCCL_DEBUG=INFO says which. Common "
            "are the wrong interface (NCCL_SOCKET_IFNAME), a firewall between nodes, and "
            "different versions of NCCL"
        ),
        marks=("unhandled system error", "ncclsystemerror"),
    ),
    HintRow(
        kind=K.NCCL,
        hint=(
            "NCCL takes tensors of a GPU only: move them to the rank's own, or make the group "
            'with init_process_group("cpu:gloo,cuda:nccl")'
        ),
        marks=("no backend type associated with device type cpu", "tensors must be cuda and dense"),
    ),
    HintRow(kind=K.PORT, hint=special.port_of_the_job, marks=special.PORT_TAKEN),
    HintRow(kind=K.PORT, hint=special.port_of_the_script, marks=special.PORT_TAKEN),
    HintRow(
        kind=K.WATCHDOG,
        hint=(
            "NCCL's watchdog was stuck in a call of CUDA or NCCL: look for a thread that holds the "
            "GIL, and for a GPU error in `dmesg -T`; TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC gives it "
            "longer"
        ),
        marks=("heartbeat monitor timed out", "watchdog got stuck for"),
        in_output=True,
        types=("",),
        when=_ended_with(-6),
    ),
    HintRow(
        kind=K.SHAPES,
        hint=(
            "ranks called a collective with tensors of different sizes or types: pad them to one "
            "shape, or gather the sizes first. TORCH_DISTRIBUTED_DEBUG=DETAIL names the ranks"
        ),
        marks=("op.preamble.length <= op.nbytes", "op.getnbytes()"),
        pattern=r"enforce fail|gloo",
    ),
    HintRow(
        kind=K.SHAPES,
        hint=(
            "the ranks are in different collectives, or pass tensors of different shapes: all "
            "must call the same ones in the same order with the same shapes"
        ),
        marks=(
            "detected mismatch between collectives on ranks",
            "cannot apply desired operation due to shape mismatches",
        ),
    ),
    HintRow(
        kind=K.SHAPES,
        hint=(
            "the tensors of a list must have the shape of the rank's own: pad them to one shape, "
            "or use all_gather_object"
        ),
        marks=("invalid tensor size at index",),
        pattern=r"ProcessGroup\w+::\w+: invalid tensor size at index",
    ),
    HintRow(
        kind=K.SHAPES,
        hint=(
            "the list must have one tensor for each rank of the group: make it with "
            "dist.get_world_size() entries"
        ),
        marks=("same as size of the process group",),
        pattern=r"Incorrect (?:input|output) list size \d+",
    ),
)

_TRAINING: tuple[HintRow, ...] = (
    HintRow(
        kind=K.DDP,
        hint=(
            "some parameters got no gradient: find_unused_parameters=True, or use them all in the "
            "loss"
        ),
        marks=("expected to have finished reduction in the prior iteration",),
    ),
    HintRow(
        kind=K.DDP,
        hint=(
            "a parameter got its gradient twice in one step: use checkpoint(..., "
            "use_reentrant=False), or DDP's static_graph=True, and no parameter outside of forward"
        ),
        marks=("expected to mark a variable ready only once", "marked as ready twice"),
    ),
    HintRow(
        kind=K.DDP,
        hint=(
            "the ranks have different models: build the same parameters on each, and freeze "
            "(requires_grad) the same ones, before DDP wraps the model"
        ),
        marks=("ddp expects same model across all ranks", "in this process with sizes"),
        pattern=r"DDP expects same model|appears not to match (?:sizes|strides)",
    ),
    HintRow(
        kind=K.DDP,
        hint="no parameter of the model is trained: set requires_grad, or do without DDP",
        marks=("distributeddataparallel is not needed when a module",),
    ),
    HintRow(
        kind=K.DTENSOR,
        hint=(
            "a plain tensor meets a sharded one: make it a DTensor with distribute_tensor, or "
            "call full_tensor() on the other. Buffers and inputs of FSDP modules count too"
        ),
        marks=("got mixed torch.tensor and dtensor",),
    ),
    HintRow(
        kind=K.BATCH_NORM,
        hint=(
            "BatchNorm needs more than one row in each rank: use drop_last=True for the loader, "
            "or a larger batch"
        ),
        marks=("expected more than 1 value per channel when training",),
    ),
    HintRow(
        kind=K.CHECKPOINT,
        hint=(
            "the checkpoint's keys begin with module., as DDP saved them: save and load "
            "model.module.state_dict(), or strip the prefix"
        ),
        marks=("in loading state_dict for",),
        pattern=r"Unexpected key\(s\) in state_dict: \"module\.",
    ),
    HintRow(
        kind=K.CHECKPOINT,
        hint=(
            "the checkpoint's keys begin with _orig_mod., as torch.compile saved them: save and "
            "load the model that was compiled, or strip the prefix"
        ),
        marks=("in loading state_dict for",),
        pattern=r"Unexpected key\(s\) in state_dict: \"_orig_mod\.",
    ),
    HintRow(
        kind=K.CHECKPOINT,
        hint=(
            "the model is wrapped by DDP and the checkpoint is not: load it into model.module, or "
            "before DDP wraps the model"
        ),
        marks=("in loading state_dict for",),
        pattern=r"Missing key\(s\) in state_dict: \"module\.",
    ),
    HintRow(
        kind=K.CHECKPOINT,
        hint=(
            "the checkpoint is of a model of another shape: build the model as it was when it "
            "was saved"
        ),
        marks=("in loading state_dict for",),
        pattern=r"size mismatch for [\w.]+: copying a param",
    ),
    HintRow(
        kind=K.CHECKPOINT,
        hint=(
            "the checkpoint has no {key}: load into what was saved, or pass "
            "DefaultLoadPlanner(allow_partial_load=True)"
        ),
        marks=("missing key in checkpoint state_dict",),
        pattern=r"Missing key in checkpoint state_dict: (?P<key>\S+?)\.?(?:\s|$)",
    ),
    HintRow(
        kind=K.CHECKPOINT,
        hint=(
            "the checkpoint is of a model of another shape: build the model as it was when it "
            "was saved"
        ),
        marks=("size mismatch between saved",),
    ),
    HintRow(
        kind=K.CHECKPOINT,
        hint=(
            "the folder holds no whole distributed checkpoint: .metadata is written last, so the "
            "save did not end; load an older one, from a folder that all nodes share"
        ),
        marks=("/.metadata'",),
        pattern=r"No such file or directory: '[^']*/\.metadata'|metadata is None",
    ),
    HintRow(
        kind=K.CHECKPOINT,
        hint=(
            "torch.load reads only tensors by default since 2.6: allow {name} with "
            "torch.serialization.add_safe_globals, or pass weights_only=False if you trust the file"
        ),
        marks=("weights only load failed",),
        pattern=r"Unsupported global: GLOBAL (?P<name>[\w.]+)",
    ),
    HintRow(
        kind=K.NAN,
        hint=(
            "the loss is not a number: look at this rank's last batch, use a lower learning rate, "
            "gradient clipping or bf16 instead of fp16; torch.autograd.set_detect_anomaly(True) "
            "finds the first such value"
        ),
        marks=(
            "loss scale already at minimum",
            "minimum loss scale reached",
            "returned nan values in its",
            "the loss returned in `training_step` is nan",
            "detected nan and/or inf values in",
            "is non-finite, so it cannot be clipped",
            "all elements of input should be between 0 and 1",
        ),
    ),
    HintRow(
        kind=K.NAN,
        hint=(
            "the loss is not a number: look at this rank's last batch, use a lower learning rate, "
            "gradient clipping or bf16 instead of fp16; torch.autograd.set_detect_anomaly(True) "
            "finds the first such value"
        ),
        marks=("nan", "inf", "not finite", "non-finite"),
        pattern=(
            r"\bloss\w*\b[^\n]{0,20}?(?:\bis|\bbecame|\bwas|\bgot|=|:)\s*(?:now )?(?:a )?"
            r"(?:nan\b|inf\b|infinite|not finite|non-?finite)"
            r"|\b(?:nan|non-?finite) (?:loss|gradient)|\binfinite loss"
            r"|\bnan\b[^\n]{0,20} in (?:the )?(?:loss|gradient)"
            r"|\bgrad(?:ient)?s?(?: norm)? (?:is|=) ?nan\b"
        ),
    ),
    HintRow(
        kind=K.NAN,
        hint=(
            "the model's output is not a number: look at this rank's last batch, use a lower "
            "learning rate, gradient clipping or bf16 instead of fp16"
        ),
        marks=("but found invalid values",),
        pattern=r"to satisfy the constraint[\s\S]*\bnan\b",
    ),
    HintRow(
        kind=K.DEEPSPEED,
        hint=(
            "{Opt.OPT} config=FILE {Opt.OPT} pass-config=deepspeed passes one; {Opt.OPT} zero "
            "and {Opt.OPT} config alone are for "
            "Accelerate's scripts"
        ),
        marks=("deepspeed requires --deepspeed_config",),
    ),
    HintRow(
        kind=K.DEEPSPEED,
        hint=(
            "are the sizes for so many workers? On CPUs Accelerate comes to DeepSpeed with one "
            "worker alone: {Opt.NUM_PROCS} 1"
        ),
        marks=("train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step *",),
    ),
)

_FILES: tuple[HintRow, ...] = (
    HintRow(
        kind=K.FILE_SIZE,
        hint="a limit of the size of files is set: raise `ulimit -f`",
        marks=("[errno 27] file too large", "file too large (os error 27)"),
    ),
    HintRow(
        kind=K.DISK,
        hint=special.full_disk,
        marks=("no space left on device", "no space left (os error 28)"),
    ),
    HintRow(
        kind=K.DISK,
        hint="a disk quota is used up: `quota -s`",
        marks=("disk quota exceeded",),
    ),
    HintRow(
        kind=K.DISK,
        hint=(
            "the checkpoint could not be written: mostly a full disk or quota, so see `df -h` and "
            "`quota -s` where it lies; `ulimit -f` limits the size of a file"
        ),
        marks=("pytorchstreamwriter failed writing file", "unexpected pos ", "write(): fd "),
        pattern=(
            r"PytorchStreamWriter failed writing file|\bunexpected pos \d+ vs \d+"
            r"|write\(\): fd \d+ failed with"
        ),
    ),
    HintRow(
        kind=K.STALE_FILE,
        hint=(
            "the file was replaced or removed on the network file system while it was open: do "
            "not change files that a job reads, or mount it anew on this node"
        ),
        marks=("stale file handle", "stale nfs file handle"),
    ),
    HintRow(
        kind=K.SAME_FILE,
        hint=(
            "each rank makes the shared memory block of one name: create it in one rank, and "
            "attach to it in the others (create=False)"
        ),
        types=("FileExistsError",),
        when=_names_shared_memory,
    ),
    HintRow(
        kind=K.SAME_FILE,
        hint=(
            "another rank removed or filled the folder at the same time: let rank 0 alone remove "
            "it, while the others wait at a barrier"
        ),
        types=("FileNotFoundError", "OSError"),
        marks=("[errno 2] no such file or directory", "[errno 39] directory not empty"),
        when=_removes_files,
    ),
    HintRow(
        kind=K.SAME_FILE,
        hint=(
            "the file is not there any more: if all ranks rename or remove it, only the first "
            "one can. Let rank 0 alone do it, while the others wait at a barrier"
        ),
        types=("FileNotFoundError",),
        marks=("[errno 2] no such file or directory",),
        when=_renames_or_removes,
    ),
    HintRow(
        kind=K.FILE_LOCK,
        hint=(
            "another process holds the lock of this file, perhaps another rank: wait for it "
            "(without LOCK_NB), or do the work on rank 0 alone"
        ),
        types=("BlockingIOError",),
        when=_asks_for_lock,
    ),
    HintRow(
        kind=K.FILE_LOCK,
        hint=(
            "another process holds the lock {path}: `fuser {path}` names it on its node. Do the work "
            "on rank 0 alone, or wait longer; a killed job leaves no lock, but a file"
        ),
        marks=("the file lock '",),
        pattern=r"The file lock '(?P<path>[^']+)' could not be acquired",
    ),
    HintRow(
        kind=K.SAME_FILE,
        hint=(
            "another process writes to this SQLite file: give each rank its own, or write on rank "
            "0 alone"
        ),
        marks=("operationalerror: database is locked",),
    ),
    HintRow(
        kind=K.SAME_FILE,
        hint=special.existing_file,
        types=("FileExistsError",),
        when=_has_others,
    ),
    HintRow(
        kind=K.DAMAGED_FILE,
        hint=(
            "the file is a web page, not what its name says: the download failed or needs a "
            "login. Remove it and fetch it again"
        ),
        marks=("not a gzipped file (b'<", "invalid load key, '<'", "unsupported operand 60"),
    ),
    HintRow(
        kind=K.DAMAGED_FILE,
        hint="the file is a pointer of Git LFS, not the data: run `git lfs pull` in its repository",
        marks=("invalid load key, 'v'", "unsupported operand 118"),
    ),
    HintRow(
        kind=K.DAMAGED_FILE,
        hint=(
            "the file is empty or cut off, as by a save that did not end or a full disk: load an "
            "older one, and save under another name that is renamed when it is complete"
        ),
        marks=(
            "eoferror: ran out of input",
            "no data left in file",
            "pickle data was truncated",
            "failed finding central directory",
            "file seems not fully written",
            "incomplete metadata, file not fully covered",
            "metadataincompletebuffer",
            "the file might be corrupted",
            "compressed file ended before the end-of-stream marker",
        ),
        types=(
            "EOFError",
            "UnpicklingError",
            "RuntimeError",
            "ValueError",
            "OSError",
            "SafetensorError",
        ),
    ),
    HintRow(
        kind=K.DAMAGED_FILE,
        hint=(
            "the file is empty or cut off, as by a save that did not end or a full disk: load an "
            "older one, and save under another name that is renamed when it is complete"
        ),
        types=("EOFError",),
        when=_reads_checkpoint,
    ),
    HintRow(
        kind=K.DAMAGED_FILE,
        hint=(
            "the file is empty or cut off, as by a save that did not end or a full disk: load an "
            "older one, and save under another name that is renamed when it is complete"
        ),
        types=("OSError",),
        marks=("[errno 22] invalid argument",),
        when=_opens_checkpoint,
    ),
)

_PROCESSES: tuple[HintRow, ...] = (
    HintRow(
        kind=K.SPAWN,
        hint="guard the script's main part with `if __name__ == '__main__':`",
        marks=("has finished its bootstrapping phase",),
    ),
    HintRow(
        kind=K.SPAWN,
        hint=(
            "a spawned process gets its function by name: give the loader or the process a "
            "function of a module, not a lambda or a function inside another"
        ),
        marks=("can't pickle", "can't get local object", "cannot pickle"),
        pattern=r"can(?:'t|not) (?:pickle|get)[^\n]*(?:<lambda>|<locals>|local object)",
    ),
    HintRow(
        kind=K.POOL,
        hint=(
            "a process of the pool ended without an exception: `dmesg -T` names an out-of-memory "
            "kill; without the pool, a crash of the rank itself is reported with its line"
        ),
        types=("BrokenProcessPool", "TerminatedWorkerError"),
        when=_no_child_crashed,
    ),
    HintRow(
        kind=K.CRASH,
        hint=(
            "native code crashed in a child process, in the call that is named: make that call in "
            "one process alone, under gdb or with another version of its library"
        ),
        when=_child_crashed,
    ),
    HintRow(
        kind=K.LOADER,
        hint=(
            "a loader worker may have been killed: a full /dev/shm or an out-of-memory kill does "
            "this: `df -h /dev/shm`, `dmesg`; use fewer loader workers"
        ),
        when=_in_worker_of_loader,
    ),
)

_ENDS: tuple[HintRow, ...] = (
    HintRow(
        kind=K.HOST_MEMORY,
        hint=(
            "the host or the cgroup ran out of memory: fewer loader workers, smaller caches, or a "
            "higher limit"
        ),
        when=lambda failure: (
            failure.evidence.end.returncode == -9 and bool(failure.evidence.end.oom_kills)
        ),
    ),
    HintRow(
        kind=K.SIGNAL,
        hint=(
            "an operator, a scheduler's limit, or an out-of-memory kill that we cannot see does "
            "this: `dmesg -T` tells"
        ),
        when=_ended_with(-9),
    ),
    HintRow(kind=K.SIGNAL, hint=special.unhandled_signal),
    HintRow(
        kind=K.NO_GROUP,
        hint=(
            "torch does this at exit where a process group still has threads: end with "
            "dist.monitored_barrier(), then dist.destroy_process_group()"
        ),
        when=special.aborted_at_exit,
    ),
    HintRow(
        kind=K.CRASH,
        hint=lambda _: f"run with {Opt.ENV('PYTHONFAULTHANDLER=1')} to get the Python line",
        when=special.crashed_somewhere,
    ),
    HintRow(
        kind=K.CRASH,
        hint=(
            "the call of that line crashed in native code: compare the versions of its library "
            "with those that it asks for, and make the call in one process alone, under gdb"
        ),
        when=special.crashed_in_a_call,
    ),
    HintRow(
        kind=K.SHARED_MEMORY,
        hint=(
            "SIGBUS mostly means a full /dev/shm{shm} (or a truncated mapped file): see `df -h /dev/shm`"
        ),
        when=_ended_with(-7),
    ),
    HintRow(
        kind=K.CRASH,
        hint=(
            "the binary was built for another CPU: compare `lscpu` with what the extension was "
            "compiled for"
        ),
        when=_ended_with(-4),
    ),
    HintRow(kind=K.SIGNAL, hint="a CPU time limit is set: `ulimit -t`", when=_ended_with(-24)),
    HintRow(kind=K.FILE_SIZE, hint="a file size limit is set: `ulimit -f`", when=_ended_with(-25)),
    HintRow(
        kind=K.SIGNAL,
        hint="native code wrote to a pipe or socket whose reader was gone",
        when=_ended_with(-13),
    ),
    HintRow(
        kind=K.COMMAND,
        hint="the command was not found: is it in the workers' PATH (see {Opt.WORKDIR}, "
        "{Opt.SETUP})?",
        when=_ended_with(127),
    ),
    HintRow(
        kind=K.COMMAND,
        hint="the command cannot be executed: is it executable, and for this machine?",
        when=_ended_with(126),
    ),
    HintRow(
        kind=K.HOST_MEMORY,
        hint="a process inside was killed: look for an out-of-memory kill in `dmesg -T`",
        when=_ended_with(137),
    ),
)

ROWS_BY_TEXT: tuple[HintRow, ...] = (
    *_STARTS,
    *SPECIFIC_FILE_ROWS,
    *SPECIFIC_LIBRARY_ROWS,
    *SPECIFIC_MODEL_ROWS,
    *_IMPORTS,
    *_LIMITS,
    *_MEMORY,
    *_GPUS,
    *_GROUPS,
    *_TRAINING,
    *_FILES,
    *_PROCESSES,
    *MODEL_ROWS,
    *LIBRARY_ROWS,
    *FILE_ROWS,
)
ROWS = (*ROWS_BY_TEXT, *_ENDS)
"""All rows, in the order in which they are tried. The last ones only examine how the worker
ended."""
