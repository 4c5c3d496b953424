"""Recognise stack frames in which a worker waits for other ranks. Return hints for hung workers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum

from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record
from distlaunch.diagnosis.failure_kinds import FailureKind, Hint
from distlaunch.diagnosis.place_hints import find_place
from distlaunch.diagnosis.stack_parser import StackView
from distlaunch.diagnosis.tracebacks import Frame


class Waiting(IntEnum):
    """How certainly a worker waits for other ranks. The workers that wait least certainly hold up
    the job."""

    NOT = 0
    MAYBE = 1
    """The worker may be waiting, for one of these reasons. A collective may run where Python does
    not see it: in backward with DDP, in a function of TensorFlow, or in a synchronisation with the
    GPU. Or the worker waits for
    a process that may be another rank, such as one that builds an extension."""
    SURELY = 2


class Wait(Record):
    """A call that waits for other ranks."""

    name: str
    """The name in the report: ``torch.distributed all_reduce``."""
    waiting: Waiting
    frame: Frame
    """The frame of the call."""

    @property
    def synchronises(self) -> bool:
        """Whether the call waits for a GPU. The process may use a CPU during such a wait."""
        return self.frame.function in _SYNCHRONISE and "/torch/" in self.frame.file


_SYNCHRONISE = frozenset({"synchronize"})
_TORCH = frozenset(
    {
        "_store_based_barrier",
        "_sync_module_states",
        "_sync_params_and_buffers",
        "_verify_param_shape_across_processes",
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "batch_isend_irecv",
        "broadcast",
        "broadcast_object_list",
        "destroy_process_group",
        "gather",
        "gather_object",
        "init_device_mesh",
        "init_process_group",
        "monitored_barrier",
        "new_group",
        "new_subgroups",
        "new_subgroups_by_enumeration",
        "recv",
        "recv_object_list",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_object_list",
        "send",
        "send_object_list",
        "split_group",
        "wait",
        "wait_tensor",
    }
)
_PLAIN = frozenset(
    {
        "allgather",
        "allgather_object",
        "allreduce",
        "allreduce_",
        "alltoall",
        "barrier",
        "broadcast",
        "broadcast_",
        "broadcast_object",
        "broadcast_optimizer_state",
        "broadcast_parameters",
        "grouped_allgather",
        "grouped_allreduce",
        "grouped_allreduce_",
        "grouped_reducescatter",
        "init",
        "join",
        "recv",
        "reduce",
        "reducescatter",
        "send",
        "shutdown",
        "synchronize",
    }
)
_JAX = frozenset(
    {"sync_global_devices", "broadcast_one_to_all", "process_allgather", "assert_equal"}
)
_TABLE: tuple[tuple[str, frozenset[str] | None, str, Waiting], ...] = (
    (
        "/torch/distributed/rendezvous.py",
        None,
        "torch.distributed init_process_group",
        Waiting.SURELY,
    ),
    ("/torch/distributed/", _TORCH, "torch.distributed {}", Waiting.SURELY),
    ("/horovod/", _PLAIN, "Horovod {}", Waiting.SURELY),
    ("/ray/util/collective/", _PLAIN, "Ray's collective {}", Waiting.SURELY),
    ("/tensorflow/python/ops/collective_ops.py", None, "TensorFlow's {}", Waiting.SURELY),
    (
        "/tensorflow/python/eager/execute.py",
        frozenset({"quick_execute"}),
        "a function of TensorFlow",
        Waiting.MAYBE,
    ),
    ("/jax/experimental/multihost_utils.py", _JAX, "JAX's {}", Waiting.SURELY),
    ("/mpi4py/", None, "mpi4py {}", Waiting.SURELY),
    (
        "/torch/autograd/",
        frozenset({"_engine_run_backward", "backward"}),
        "backward",
        Waiting.MAYBE,
    ),
    ("/torch/cuda/", _SYNCHRONISE, "torch.cuda.synchronize", Waiting.MAYBE),
    ("/ray/_private/worker.py", frozenset({"get", "wait"}), "ray.{}", Waiting.MAYBE),
    ("/torch/utils/file_baton.py", None, "the lock of an extension that is built", Waiting.MAYBE),
)
"""Calls that wait for other ranks: a substring of the file's path, the functions (None: any), the
name in the report, and how certainly the call waits."""

_NATIVE_CALLS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\b(?:TCPStore|FileStore|HashStore|PrefixStore)\("), "torch.distributed TCPStore"),
    (re.compile(r"store\w*\.(?:wait|get|multi_get|barrier)\("), "a store of torch.distributed"),
    (re.compile(r"\b(?:\w*work\w*|handle|req|request)\.wait\("), "torch.distributed wait"),
    (
        re.compile(r"\b(?:comm|COMM_WORLD|world)\.(?:[Bb]arrier|[Rr]ecv|[Aa]ll\w+|[Bb]cast)\("),
        "mpi4py",
    ),
)
"""Calls of native code that wait for other ranks. They have no frame below that of the script, so
that only the line of source shows them: ``store.wait(["ready"])``."""

_SAME = {
    "init_process_group": (
        "all wait for the group to form: has every rank the same WORLD_SIZE and MASTER_ADDR, and "
        "can the nodes reach"
        " each other? (GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME name the interface)"
    ),
}
_SAME_ANY = (
    "all wait in the same call: a rank may have skipped one before, or use other sizes or another "
    "group"
    " (TORCH_DISTRIBUTED_DEBUG=DETAIL checks that), or the network between them does not work"
)
DIFFERENT = "ranks wait in different collectives: all must call the same ones in the same order"


def find_wait(view: StackView) -> Wait | None:
    """Return the outermost call below the script's innermost frame that waits for other ranks.
    Return None if no call waits.

    A call of native code has no frame. It is recognised by the line of source at the script's
    innermost frame.
    """
    for frame in reversed(view.below):
        for part, functions, name, waiting in _TABLE:
            if part in frame.file and (functions is None or frame.function in functions):
                return Wait(name=name.format(frame.function), waiting=waiting, frame=frame)
    if not view.below and view.place is not None:
        for pattern, name in _NATIVE_CALLS:
            if pattern.search(view.source):
                return Wait(name=name, waiting=Waiting.SURELY, frame=view.place)
    return None


_CHILDREN = (
    "/torch/utils/data/",
    "/multiprocessing/",
    "/subprocess.py",
    "/concurrent/futures/",
    "/joblib/",
)
"""Parts of paths of files in which a worker waits for its own child processes."""
_QUESTION = re.compile(r"\b(?:input|breakpoint|sys\.stdin\.read(?:line)?)\(|\bset_trace\(")
_SLEEPS: tuple[tuple[str, frozenset[str] | None], ...] = (
    ("/threading.py", frozenset({"wait", "join", "acquire", "_wait_for_tstate_lock", "__enter__"})),
    ("/queue.py", None),
    ("/selectors.py", None),
    (
        "/subprocess.py",
        frozenset({"wait", "_wait", "_try_wait", "poll", "communicate", "_communicate"}),
    ),
    ("/multiprocessing/", None),
    ("/concurrent/futures/_base.py", frozenset({"result", "exception", "wait"})),
    ("/socket.py", frozenset({"accept", "readinto"})),
    ("/ssl.py", None),
    ("/filelock/", None),
    ("/torch/utils/data/dataloader.py", frozenset({"_try_get_data", "_get_data"})),
)
"""Calls that wait for anything: a substring of the file's path, and the functions (None: any). The
line within such a call carries no information."""


def call_that_waits(view: StackView) -> Frame | None:
    """Return the outermost call below the script's innermost frame that waits, for other ranks or
    for anything else. Return None if no call waits."""
    for frame in reversed(view.below):
        if any(_matches(frame, part, functions) for part, functions in _SLEEPS):
            return frame
        if any(_matches(frame, part, functions) for part, functions, _, _ in _TABLE):
            return frame
    return None


def waits_for_children(view: StackView) -> bool:
    """Return whether a worker waits for child processes of its own."""
    return any(part in frame.file for frame in view.below for part in _CHILDREN)


def hint_for_place(view: StackView) -> Hint | None:
    """Return a hint for a worker that does not wait for other ranks, by the library call that its
    stack shows. Return None if no hint is known."""
    row = find_place(view.below)
    if row is None and not view.below and _QUESTION.search(view.source):
        return Hint(
            kind=FailureKind.QUESTION,
            text="it waits for a line on stdin: take the value from an option or a variable, and "
            "remove breakpoints (docs/debugging.md)",
        )
    return Hint(kind=row.kind, text=row.hint.format(Opt=Opt)) if row else None


def hint_for_all(waits: Sequence[Wait]) -> str | None:
    """Return a hint for the case that every rank waits for the others, in ``waits``; None if no
    hint is known."""
    names = {wait.name for wait in waits}
    if not waits or any(wait.waiting is not Waiting.SURELY for wait in waits):
        return None
    if len(names) > 1:
        return DIFFERENT
    return _SAME.get(names.pop().rpartition(" ")[2], _SAME_ANY)


def _matches(frame: Frame, part: str, functions: frozenset[str] | None) -> bool:
    return part in frame.file and (functions is None or frame.function in functions)
