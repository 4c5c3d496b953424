"""What diagnosis reads and what it concludes."""

from __future__ import annotations

from typing import Literal

from distlaunch.core.model.record import Record

RepeatKind = Literal["syntax error", "import error", "missing script", "usage error"]


class WorkerEnd(Record):
    """How one worker ended, with the evidence its agent kept.

    Not the message ``WorkerExited``: this record has the worker's place in the job, times on the
    coordinator's clock, and a shorter end of stderr where thousands have failed.
    """

    rank: int
    local_rank: int
    host: str
    pid: int
    returncode: int
    """Exit code, or -N for death by signal N (as subprocess has it)."""
    ended_s: float
    """Seconds since the attempt began, on the coordinator's clock."""
    uptime_s: float
    told_to_stop: bool
    """We had sent it TERM/INT/KILL before it ended."""
    stderr_tail: bytes = b""
    """The last bytes it wrote to stderr (up to 64 KiB; with a pty: of its terminal)."""
    error_file: bytes | None = None
    """Content of its TORCHELASTIC_ERROR_FILE (capped at 256 KiB), if it wrote one."""
    oom_kills: int = 0
    """How many OOM kills the kernel counted for its cgroup (or the host) during the attempt."""
    log_path: str | None = None


class Cause(Record):
    """The first cause of a failed attempt."""

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
    """What the report says and what the restart rule needs."""

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
