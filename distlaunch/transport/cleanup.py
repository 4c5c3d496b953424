"""Cleanup of closed connections in the background, and a limit on how long a main loop waits for
it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

_lock = threading.Lock()
_jobs: deque[Callable[[], None]] = deque()
_thread: threading.Thread | None = None
_MOST_S = 0.1
"""Longest total wait of a main loop, regained at ``_RATE``. A thousand connections may be lost at
once."""
_RATE = 0.02
T = TypeVar("T")


def run_in_background(job: Callable[[], None]) -> None:
    """Run a job after the jobs that were added before it; at once if no thread can be started."""
    global _thread  # noqa: PLW0603 - one for all connections of the process
    with _lock:
        _jobs.append(job)
        if _thread is not None:
            return
        _thread = threading.Thread(target=_work, name="dl-cleanup", daemon=True)
        try:
            _thread.start()
        except RuntimeError:
            _thread = None
            _jobs.pop()
        else:
            return
    job()


def _work() -> None:
    global _thread  # noqa: PLW0603 - as above
    while True:
        with _lock:
            if not _jobs:
                _thread = None
                return
            job = _jobs.popleft()
        with suppress(
            Exception
        ):  # paramiko raises EOFError, SSHException and OSError on closed connections
            job()


class WaitBudget:
    """How long the main loop may wait, for all connections of a process together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left_s = _MOST_S
        self._at = clock()

    def spend(self, wait: Callable[[float], T]) -> T:
        """Call ``wait`` with the seconds that are left, deduct the time that it takes, and return
        its result."""
        began = self._clock()
        self._left_s = min(_MOST_S, self._left_s + (began - self._at) * _RATE)
        result = wait(max(0.0, self._left_s))
        self._at = self._clock()
        self._left_s -= self._at - began
        return result


wait_budget = WaitBudget()
