"""The results of the diagnosis."""

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
    """One line: ``exit code 1``, ``killed by SIGSEGV (segmentation fault)``, ..."""
    exception_type: str | None = None
    message: str | None = None
    original: str | None = None
    """For chained exceptions and groups: ``Type: message`` of the original one, if it differs."""
    frame: str | None = None
    """Innermost frame of the user's code: ``train.py:42 in step``."""
    excerpt: tuple[str, ...] = ()
    """The exception's own last lines, at most 20, ready to print (no control characters)."""
    last_words: bool = False
    """The excerpt is the last output of the worker, not the lines of an exception."""
    at_once: bool = False
    """The ranks failed together because their nodes were lost, not one after the other."""
    awaited: bool = False
    """The ranks have raised nothing: others waited for them in vain. ``exception_type`` and
    ``message`` are then what ``told_by`` printed, and ``excerpt`` is the stack of the first rank."""
    told_by: int | None = None
    """The rank that waited in vain and printed the exception."""
    stream: Literal["stderr", "stdout"] = "stderr"
    """The stream on which the worker wrote the excerpt."""
    log_path: str | None = None


class Diagnosis(Record):
    """The values for the report and for the restart rule."""

    cause: Cause
    exit_code: int
    """The launcher's exit code if the job ends here: that of the named worker, or 128+N for signal
    N."""
    failed_too: tuple[str, ...] = ()
    """The ranks that failed for another reason at almost the same time, one line per kind."""
    others: tuple[str, ...] = ()
    """The states of the other ranks, one line per kind: ``ranks 1-3: stopped by us``, ..."""
    hint: str | None = None
    hint_kind: str | None = None
    """The kind of the failure: a section of ``docs/hints.md``."""
    repeats: RepeatKind | None = None
    """Set if the failure would certainly repeat. There is no restart then, if it came before
    --min-uptime."""
    signature: tuple[str, str] | None = None
    """(exception type, innermost frame). The job ends if two attempts have the same value and made
    no progress."""
    cause_seen: bool = True
    """False if all failures are consequences. ``cause`` then names the ranks that show them, and
    says so."""
    missing_module: str | None = None
    """The module that the failed worker's interpreter does not have."""
