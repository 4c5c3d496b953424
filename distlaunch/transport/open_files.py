"""Raises the launcher's limit of open files for jobs with many nodes and ranks.

Workers keep the original limit. The limit belongs to the process, so this module remembers the
original one.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence

_PER_LINK = 8
_OF_OUR_OWN = 128
_found: list[int] = []
"""The original limit, if it was raised."""
_SCRIPT = 'ulimit -S -n "$0" && exec "$@"'


def allow_files(*, links: int, logs: int) -> None:
    """Raise the soft limit as far as needed and allowed. With less, log files are reopened often.

    ``logs`` is the number of log files, which may use at most half of all
    (``core.agent.workers.log_files``).
    """
    allow(_OF_OUR_OWN + max(_PER_LINK * links + logs, 2 * logs))


def allow(needed: int) -> bool:
    """Raise the soft limit to this, or as far as allowed. Return whether it is higher than before."""
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
    """Return the original limit, or ``soft`` if the limit was not raised."""
    return _found[0] if _found else soft


def as_found(argv: Sequence[str]) -> list[str]:
    """Return the command line that starts a program with the original limit."""
    return ["/bin/sh", "-c", _SCRIPT, str(_found[0]), *argv] if _found else list(argv)
