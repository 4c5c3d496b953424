"""Our limit of open files, raised for a job of many nodes and ranks, and kept from the workers.

It belongs to the process, so what was found is kept here: programs that pass it on to workers get
that.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence

_PER_LINK = 8
_OF_OUR_OWN = 128
_found: list[int] = []
"""The limit that we started with, once it is raised."""
_SCRIPT = 'ulimit -S -n "$0" && exec "$@"'


def allow_files(*, links: int, logs: int) -> None:
    """Raise the soft limit as far as that is needed and allowed; with less, logs are opened again
    and again.

    ``logs``: how many files may be written to; they take no more than half of all
    (``core.agent.filing``).
    """
    allow(_OF_OUR_OWN + max(_PER_LINK * links + logs, 2 * logs))


def allow(needed: int) -> bool:
    """Raise the soft limit to this, or as far towards it as we may; tell whether it is higher than
    before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft == resource.RLIM_INFINITY or most <= soft:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):
        return False
    if not _found:
        _found.append(soft)
    return True


def found(soft: int) -> int:
    """Return the limit that we started with; ``soft`` if it has not been raised here."""
    return _found[0] if _found else soft


def as_found(argv: Sequence[str]) -> list[str]:
    """Have a program start with the limit that we started with."""
    return ["/bin/sh", "-c", _SCRIPT, str(_found[0]), *argv] if _found else list(argv)
