"""What is left to do for closed connections, and may wait: a thread's, while there is any."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

_lock = threading.Lock()
_jobs: deque[Callable[[], None]] = deque()
_thread: threading.Thread | None = None


def bury(job: Callable[[], None]) -> None:
    """Have this done soon, after what was asked for before. Where no thread can be started it is done at once."""
    global _thread  # noqa: PLW0603 - one for all connections of the process
    with _lock:
        _jobs.append(job)
        if _thread is not None:
            return
        _thread = threading.Thread(target=_work, name="dl-bury", daemon=True)
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
        with suppress(Exception):  # paramiko's: EOFError, SSHException, OSError; what is closed is closed
            job()
