"""Run work that may block on a file server, for a limited time.

An agent that sends nothing for ``SILENCE_S`` is considered lost, with its node.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

FILES_S = 1.0
T = TypeVar("T")


def run_with_timeout(bound_s: float, work: Callable[[], T]) -> T:
    """Run ``work`` in a thread and return its result.

    Raises TimeoutError after ``bound_s``, and OSError. After a timeout the thread continues.
    """
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
