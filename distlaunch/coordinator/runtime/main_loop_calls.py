"""Let other threads run functions in the main loop.

The main loop owns the policy and the transport, which have no locks. A thread that has to read or
change them passes a function to ``MainLoopCalls.call``.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")


class MainLoopClosedError(RuntimeError):
    """The main loop has ended, so it does not run the function."""


class MainLoopCalls:
    """A queue of functions, and a descriptor that is readable while the queue has any."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = Lock()
        self._queue: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._is_closed = False

    def fileno(self) -> int:
        """Return the descriptor that the main loop polls for reading."""
        return self._read

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Let the main loop run ``function``. May be called from any thread.

        The result, or the exception, is in the future. The exception is ``MainLoopClosedError`` if
        the main loop ends before it has run the function.
        """
        from concurrent.futures import Future

        future: Future[T] = Future()
        with self._lock:
            if not self._is_closed:
                self._queue.append((function, future))
                with suppress(BlockingIOError):  # a full pipe wakes the main loop as well
                    os.write(self._write, b"\0")
                return future
        future.set_exception(MainLoopClosedError())
        return future

    def run(self) -> None:
        """Run the functions that are in the queue now. Called by the main loop."""
        with suppress(BlockingIOError):
            os.read(self._read, 4096)
        for _ in range(len(self._queue)):
            function, future = self._queue.popleft()
            try:
                result = function()
            except Exception as exc:  # noqa: BLE001 - the caller gets it
                future.set_exception(exc)
            else:
                future.set_result(result)

    def close(self) -> None:
        """Refuse further functions. Those of the queue are not run."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            os.close(self._read)
            os.close(self._write)
        for _, future in self._queue:
            future.set_exception(MainLoopClosedError())
        self._queue.clear()
