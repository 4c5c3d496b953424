"""The results of the diagnosis."""

from __future__ import annotations

from typing import Literal

from distlaunch.core.model.record import Record

RepeatKind = Literal["syntax error", "import error", "missing script", "usage error"]


class Cause(Record):
    """The first cause of a failed attempt: the same failure of one or more ranks, or lost nodes."""

    ranks: tuple[int, ...]
    """All ranks that failed in this same way, the first to end first."""
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
    """The excerpt is what the worker wrote last, and no exception's own lines."""
    at_once: bool = False
    """It is nothing that one rank after the other did: their nodes were lost."""
    log_path: str | None = None


class Diagnosis(Record):
    """The values for the report and for the restart rule."""

    cause: Cause
    exit_code: int
    """What the launcher exits with if the job ends here (design: the named worker's own code, 128+N
    for signal N)."""
    others: tuple[str, ...] = ()
    """What the other ranks were doing, one line per kind: ``ranks 1-3: stopped by us``, ..."""
    hint: str | None = None
    repeats: RepeatKind | None = None
    """Set if the failure would certainly repeat: no restart then (if it came before
    --min-uptime)."""
    signature: tuple[str, str] | None = None
    """(exception type, innermost frame): two attempts with the same one and no progress end the
    job."""
    cause_seen: bool = True
    """False if all ends are consequences: then ``cause`` names the ranks that show them, and says
    so."""
    missing_module: str | None = None
    """The module that the failed worker's interpreter does not have."""
