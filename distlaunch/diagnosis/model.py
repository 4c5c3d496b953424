"""The results of the diagnosis of a failed attempt."""

from __future__ import annotations

from typing import Literal

from distlaunch.core.model.record import Record

RepeatKind = Literal["syntax error", "import error", "missing script", "usage error"]


class Cause(Record):
    """The first cause of a failed attempt: the same failure of one or more ranks, or lost nodes."""

    ranks: tuple[int, ...]
    """All ranks that failed in the same way, in the order of their exits."""
    host: str
    returncode: int
    summary: str
    """One line on how the ranks ended: ``exit code 1``, ``killed by SIGSEGV (segmentation fault)``,
    ..."""
    exception_type: str | None = None
    message: str | None = None
    original: str | None = None
    """``Type: message`` of the exception that was raised first in a chain or group, if it is not
    the reported one."""
    frame: str | None = None
    """Innermost frame of the user's code: ``train.py:42 in step``."""
    excerpt: tuple[str, ...] = ()
    """The exception's own last lines, at most 20, ready to print (no control characters)."""
    last_words: bool = False
    """Whether the excerpt is the last output of the worker, and not an exception's."""
    at_once: bool = False
    """Whether the ranks failed together because their nodes were lost, not one after the other."""
    awaited: bool = False
    """Whether other ranks waited for the ranks, which raised no exception, until a timeout.
    ``exception_type`` and ``message`` are then those that the rank ``told_by`` printed, and
    ``excerpt`` is the stack of the first rank."""
    told_by: int | None = None
    """The rank that waited until the timeout and printed the exception."""
    written: tuple[str, ...] = ()
    """Lines on what ranks had written about their wait, if ``awaited``."""
    stream: Literal["stderr", "stdout"] = "stderr"
    """The stream to which the worker wrote the excerpt."""
    log_path: str | None = None


class Diagnosis(Record):
    """The values for the report and for the restart rule."""

    cause: Cause
    exit_code: int
    """The launcher's exit code if the job ends here: that of the named worker, or 128+N for signal
    N."""
    failed_too: tuple[str, ...] = ()
    """Lines on ranks that failed for another reason at almost the same time, one line per kind of
    failure."""
    others: tuple[str, ...] = ()
    """Lines on the states of the remaining ranks, one line per kind of state: ``ranks 1-3: stopped
    by us``, ..."""
    hint: str | None = None
    hint_kind: str | None = None
    """The kind of the failure: a section of ``docs/hints.md``."""
    repeats: RepeatKind | None = None
    """The kind of a failure that would certainly repeat; None for other failures. No restart
    follows if such a failure occurred before --min-uptime."""
    signature: tuple[str, str] | None = None
    """Exception type and innermost frame. The job ends if two attempts have the same signature and
    made no progress."""
    cause_seen: bool = True
    """False if all failures are consequences. ``cause`` then has the ranks that show them, and says
    that the cause is not known."""
    missing_module: str | None = None
    """The module that the failed worker's interpreter does not have."""
