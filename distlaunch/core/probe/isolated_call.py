"""Call a driver that may hang or crash, in a child process.

A process stuck in a driver cannot be killed, and a thread stuck there keeps its process from
exiting. At the deadline the child is killed, and abandoned if it does not end.
"""

from __future__ import annotations

import marshal
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any, Literal

Failure = Literal["late", "died"]
Plain = tuple[Any, ...]
"""Result of the child, as marshal can write it."""

_REAP_S = 0.2
"""How long to wait for the child's end, which may never come."""


def is_single_threaded() -> bool:
    """Return whether this process has only one thread, so that a forked child may run Python code.

    With other threads, the child might inherit a lock that is never released.
    """
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def run_in_child(
    work: Callable[[], Plain], *, deadline_s: float
) -> tuple[Plain, None] | tuple[None, Failure]:
    """Run ``work`` in a forked child. Return its result and None, or None and how it failed.

    The child is ``late`` at ``deadline_s`` (monotonic), or has ``died`` without a result, as also
    by an exception. Requires ``is_single_threaded()``.
    """
    reader, writer = os.pipe()
    # The child must not run our signal handlers, which write to the parent's pipes.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _answer_and_exit(work, writer)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(writer)
    try:
        data = _read_all(reader, deadline_s)
    finally:
        os.close(reader)
        _kill_child(pid)
    if data is None:
        return None, "late"
    try:
        result: Plain = marshal.loads(data)  # noqa: S302 - written by our own fork, nobody else holds the pipe
    except (EOFError, ValueError, TypeError):
        return None, "died"
    return result, None


def _answer_and_exit(work: Callable[[], Plain], writer: int) -> None:
    try:
        data = marshal.dumps(work())
        while data:
            data = data[os.write(writer, data) :]
    finally:
        os._exit(0)


def _read_all(reader: int, deadline_s: float) -> bytes | None:
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    chunks: list[bytes] = []
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            return None
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)


def _kill_child(pid: int) -> None:
    until = time.monotonic() + _REAP_S
    try:
        os.kill(pid, signal.SIGKILL)
        while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < until:
            time.sleep(0.0005)
    except (ProcessLookupError, ChildProcessError):
        pass  # someone else reaped it, or SIGCHLD is ignored
