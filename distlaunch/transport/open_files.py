"""Raise the launcher's limit of open files for jobs with many nodes and ranks.

Workers start with the original limit, which this module keeps.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence

_PER_CONNECTION = 8
_OF_OUR_OWN = 128
_original: list[int] = []
_SCRIPT = 'ulimit -S -n "$0" && exec "$@"'


def raise_limit_for_job(*, connections: int, logs: int) -> None:
    """Raise the soft limit as far as needed and allowed. With less, log files are reopened often.

    ``logs`` is the number of log files, which may use at most half of all
    (``core.agent.workers.log_files``).
    """
    raise_limit(_OF_OUR_OWN + max(_PER_CONNECTION * connections + logs, 2 * logs))


def raise_limit(needed: int) -> bool:
    """Raise the soft limit to ``needed``, or to the hard limit if that is lower. Return whether it
    was raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft == resource.RLIM_INFINITY or most <= soft:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):
        return False
    if not _original:
        _original.append(soft)
    return True


def original_limit(soft: int) -> int:
    """Return the original limit, or ``soft`` if it was not raised."""
    return _original[0] if _original else soft


def with_original_limit(argv: Sequence[str]) -> list[str]:
    """Return ``argv``, changed so that the program gets the soft limit of open files that this
    process had at its start."""
    return ["/bin/sh", "-c", _SCRIPT, str(_original[0]), *argv] if _original else list(argv)
