"""The kinds of failures for which a hint is known, and the data from which a hint is chosen."""

from __future__ import annotations

from enum import Enum

from distlaunch.core.model.record import Record
from distlaunch.diagnosis.clean_text import to_lines
from distlaunch.diagnosis.evidence import FailureEvidence
from distlaunch.diagnosis.resources import LibraryCall, last_calls

_OUTPUT_BYTES = 16384
_OUTPUT_LINES = 150


class FailureKind(Enum):
    """A kind of failure. The value is the anchor of its section in ``docs/hints.md``."""

    NOT_PYTHON = "not-a-python-program"
    QUESTION = "a-question-on-stdin"
    OPTION = "options-of-the-script"
    COMMAND = "commands"
    MODULE = "missing-modules"
    OLD_NAME = "names-that-a-library-no-longer-has"
    BINARY = "shared-libraries"
    VARIABLE = "environment-variables"
    DOWNLOAD = "downloads"
    GPU_MEMORY = "gpu-memory"
    HOST_MEMORY = "host-memory"
    SHARED_MEMORY = "shared-memory"
    DISK = "full-disks"
    FILE_SIZE = "file-size-limits"
    STALE_FILE = "stale-file-handles"
    SAME_FILE = "files-that-every-rank-makes"
    DAMAGED_FILE = "damaged-files"
    MISSING_FILE = "missing-files"
    PERMISSION = "permissions"
    FILE_SYSTEM = "file-systems"
    STORE = "object-stores"
    ENCODING = "text-encodings"
    CONFIG = "configuration-files"
    CHECKPOINT = "checkpoints-that-do-not-fit"
    GPU_NUMBER = "gpu-numbers"
    GPU_BUSY = "busy-gpus"
    GPU_FAULT = "broken-gpus"
    GPU_BUILD = "builds-for-another-gpu"
    GPU_DRIVER = "gpu-drivers"
    NO_GPU = "no-gpu"
    GPU_FORK = "cuda-in-a-forked-process"
    GPU_KERNEL = "errors-of-gpu-kernels"
    CONVOLUTION = "cudnn"
    INDEX = "indices-out-of-range"
    RANK = "ranks-and-world-size"
    NO_GROUP = "no-process-group"
    SAME_GPU = "two-ranks-on-one-gpu"
    INTERFACE = "network-interfaces"
    NCCL = "nccl-errors"
    PORT = "ports"
    FILE_STORE = "file-stores"
    RENDEZVOUS = "ranks-that-do-not-join"
    AWAITED = "ranks-that-do-not-come"
    KEY = "keys-of-a-store"
    EARLY = "ranks-that-end-early"
    ORDER = "the-order-of-collectives"
    NETWORK = "broken-connections"
    WATCHDOG = "nccl-heartbeat"
    SHAPES = "collectives-that-differ"
    DDP = "distributed-data-parallel"
    DTENSOR = "dtensors"
    BATCH_NORM = "batches-of-one-row"
    TENSOR = "tensors"
    GRADIENT = "gradients"
    BATCH = "batches-of-a-data-set"
    SHARDED = "sharded-models"
    TRAINER = "trainers"
    NAN = "nan"
    THREADS = "threads-and-processes"
    OPEN_FILES = "open-files"
    SOCKET_PATH = "socket-paths"
    SPAWN = "spawned-processes"
    POOL = "process-pools"
    LOADER = "data-loader-workers"
    DEEPSPEED = "deepspeed-configuration"
    RAY = "ray"
    TRACKER = "experiment-trackers"
    SIGNAL = "signals"
    CRASH = "crashes-of-native-code"
    EXTENSION = "extensions-that-are-built"
    FILE_LOCK = "file-locks"
    IMPORT = "slow-imports"
    CHILD = "child-processes"
    THREAD = "threads-that-wait"


class Hint(Record):
    """What to do about a failure."""

    kind: FailureKind
    text: str
    tells_why_ranks_did_not_meet: bool = False
    """Whether the hint explains why ranks did not join a collective, even running ones."""


class Failure:
    """The data of a failure for the rows of ``hint_table``."""

    def __init__(
        self,
        evidence: FailureEvidence,
        *,
        python: str | None,
        world_size: int,
        adds_local_rank: bool = False,
        dashes_first: bool = False,
        master_port: int | None = None,
        nodes: int = 1,
    ) -> None:
        self.evidence = evidence
        self.python = python
        self.world_size = world_size
        self.adds_local_rank = adds_local_rank
        self.dashes_first = dashes_first
        self.master_port = master_port
        self.nodes = nodes
        self.type = (evidence.exception_type or "").rpartition(".")[2]
        original = (evidence.original or "").partition(":")[0].rpartition(".")[2]
        self.types = frozenset((self.type, original) if original.isidentifier() else (self.type,))
        """The type of the exception, and that of the original exception behind it."""
        self.text = f"{evidence.exception_type or ''}: {evidence.message or ''}\n{evidence.text}"
        """The exception, its message and its further lines."""
        self.lower = self.text.lower()
        end = evidence.end
        tail = (
            end.stdout_tail.encode("utf-8", "replace")
            if evidence.stream == "stdout"
            else end.stderr_tail
        )
        self.output = "\n".join(to_lines(tail[-_OUTPUT_BYTES:])[-_OUTPUT_LINES:])
        """The last lines of the stream that shows the failure, perhaps with lines of other
        programs."""
        size = end.shared_memory_bytes
        self.shared_memory = "" if size is None else f" of {size >> 20} MiB"
        """The size of /dev/shm on the worker's node, as words behind its name."""
        self.lower_output = self.output.lower()
        self.calls: tuple[LibraryCall, ...] = last_calls(self.output)

    def in_call(self, file: str, *functions: str) -> bool:
        """Return whether the traceback has a frame in a file whose path contains ``file`` (and in
        one of ``functions``)."""
        return any(
            file in call.file and (not functions or call.function in functions)
            for call in self.calls
        )
