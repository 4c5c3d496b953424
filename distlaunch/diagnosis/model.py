"""The results of the diagnosis of a failed attempt."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from distlaunch.core.model.record import Record

RepeatKind = Literal["syntax error", "import error", "missing script", "usage error"]


class WaitKind(Enum):
    """For what ranks waited in vain. The value is that in ``report.json``."""

    RENDEZVOUS = "rendezvous"
    """For the process group to form."""
    BARRIER = "barrier"
    COLLECTIVE = "collective"
    KEY = "key"
    """For a key that the script sets in a store."""


class Mechanism(Enum):
    """Who ended a wait. The value is that in ``report.json``."""

    MONITORED_BARRIER = "monitored_barrier"
    TCP_STORE = "tcp_store"
    TCP_STORE_CONNECTION = "tcp_store_connection"
    """The store of rank 0 could not be connected."""
    STORE_BARRIER = "store_based_barrier"
    GLOO = "gloo"
    NCCL_WATCHDOG = "nccl_watchdog"
    NCCL_HEARTBEAT = "nccl_heartbeat_monitor"
    HOROVOD = "horovod"
    TENSORFLOW = "tensorflow"
    JAX = "jax"
    RAY = "ray"
    MPI = "mpi"


class FailedWait(Record):
    """In which call ranks waited in vain for the awaited ranks. What is not known is None."""

    kind: WaitKind
    mechanism: Mechanism | None = None
    ranks: tuple[int, ...] = ()
    """The ranks that waited."""
    call: str | None = None
    """The collective, as the library names it: ``all_reduce``, ``ALLREDUCE``, ``allreduce.grad``."""
    timeout_s: float | None = None
    sequence: int | None = None
    """The number of the collective in the process group."""
    last_sequence: int | None = None
    """The number of the last collective of the awaited ranks, if they are behind."""
    joined: int | None = None
    expected: int | None = None
    """In a rendezvous, ``joined`` of ``expected`` ranks had come."""
    key: str | None = None
    """The key of the store."""


class Cause(Record):
    """The first cause of a failed attempt: the same failure of one or more ranks, or lost nodes."""

    ranks: tuple[int, ...]
    """All ranks that failed in the same way, in the order of their exits."""
    host: str
    returncode: int
    summary: str
    """How the ranks ended: ``exit code 1``, ``killed by SIGSEGV (segmentation fault)``, ..."""
    exception_type: str | None = None
    message: str | None = None
    original: str | None = None
    """``Type: message`` of the exception that was raised first, if it is not the reported one."""
    frame: str | None = None
    """Innermost frame of the user's code: ``train.py:42 in step``."""
    excerpt: tuple[str, ...] = ()
    """The exception's own last lines, at most 20, without control characters."""
    last_words: bool = False
    """Whether the excerpt is the last output of the worker, and not an exception's."""
    at_once: bool = False
    """Whether the ranks failed together because their nodes were lost."""
    awaited: bool = False
    """Whether other ranks waited until a timeout for these ranks, which raised no exception.
    ``exception_type`` and ``message`` are then those of the rank ``told_by``, and ``excerpt`` is
    the stack of the first rank."""
    told_by: int | None = None
    """The rank that waited until the timeout and printed the exception."""
    wait: FailedWait | None = None
    """The call in which the others waited, if ``awaited`` and if it is known."""
    written: tuple[str, ...] = ()
    """Lines on what ranks had written about their wait, if ``awaited``."""
    stream: Literal["stderr", "stdout"] = "stderr"
    """The stream to which the worker wrote the excerpt."""
    log_path: str | None = None


class Diagnosis(Record):
    """The values for the report and for the restart rule."""

    cause: Cause
    exit_code: int
    """The launcher's exit code if the job ends here: the named worker's, or 128+N for signal N."""
    failed_too: tuple[str, ...] = ()
    """A line per kind of failure of ranks that failed for another reason at almost the same
    time."""
    others: tuple[str, ...] = ()
    """A line per kind of state of the remaining ranks: ``ranks 1-3: stopped by us``, ..."""
    hint: str | None = None
    hint_kind: str | None = None
    """The kind of the failure: a section of ``docs/hints.md``."""
    repeats: RepeatKind | None = None
    """The kind of a failure that would certainly repeat. No restart follows if it occurred before
    --min-uptime."""
    signature: tuple[str, str] | None = None
    """Exception type and innermost frame. The job ends if two attempts have the same and made no
    progress."""
    cause_seen: bool = True
    """False if all failures are consequences. ``cause`` then has the ranks that show them, without
    a cause."""
    missing_module: str | None = None
    """The module that the failed worker's interpreter lacks."""
