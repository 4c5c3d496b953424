"""Work that may wait for a file server, for which the agent's loop only waits so long.

An agent that does not answer for ``SILENCE_S`` is taken for lost, with its node.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

FILES_S = 1.0
T = TypeVar("T")


def within(bound_s: float, work: Callable[[], T]) -> T:
    """Return what ``work`` gives, done in a thread; it goes on there if it takes longer. Raises
    TimeoutError, OSError."""
    found: list[T | OSError] = []

    def run() -> None:
        try:
            found.append(work())
        except OSError as exc:
            found.append(exc)

    thread = threading.Thread(target=run, name="files", daemon=True)
    try:
        thread.start()
    except RuntimeError as exc:
        raise OSError("no thread can be started") from exc
    thread.join(bound_s)
    result = next(iter(found), TimeoutError("a file server does not answer"))
    if isinstance(result, OSError):
        raise result
    return result
