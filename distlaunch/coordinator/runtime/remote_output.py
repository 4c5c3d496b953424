"""Write and show the output of workers on other machines, in a thread.

The main loop queues the output and never waits for a disk or the console. An agent may only send as
many bytes as it has credit for. The agent gets new credit when this thread has written the output,
so that memory is bounded.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

from distlaunch.coordinator.runtime.records import DiskWork
from distlaunch.coordinator.runtime.signal_pipe import LOOK_S
from distlaunch.core.agent.workers.output_pump import OutputSink
from distlaunch.core.protocol import agent_messages as m

_ALL_WINDOWS_BYTES = 64 << 20
_WINDOW_BYTES = (256 << 10, 1 << 20)
"""The smallest and the largest number of output bytes of a node that may be queued."""
_ANSWER_S = 1.0
"""How long the main loop may wait: a fraction of the silence after which a node is considered
lost."""
_GRANT_AT = 4
"""New credit is sent in units of the window divided by this number."""


T = TypeVar("T")


class AttemptOutputSink(OutputSink, Protocol):
    """An output sink with a directory for each attempt."""

    def begin_attempt(self, attempt: int) -> None:
        """Write to this attempt's directory from now on."""


class OutputThread(threading.Thread, DiskWork):
    """Writes output in the order of its arrival, and runs other work that may wait for a disk.

    The thread calls ``grant(node, size)`` to send new credit.
    """

    def __init__(
        self, files: AttemptOutputSink, *, nodes: int, grant: Callable[[int, int], None]
    ) -> None:
        super().__init__(name="output", daemon=True)
        self._files = files
        self._grant = grant
        least, most = _WINDOW_BYTES
        self.window = max(least, min(most, _ALL_WINDOWS_BYTES // max(1, nodes)))
        """The first credit of each node, in bytes."""
        self._taken: dict[int, int] = {}  # bytes taken, by node, for which no credit was given yet
        self._open: dict[int, set[int]] = {}  # ranks whose output has not ended, by node
        self._work: deque[Callable[[float], object]] = deque()
        self._changed = threading.Condition()
        self._nudged = False
        self._ending = False
        self._over = False
        self.fault: str | None = None
        """The traceback of the internal error that ended the thread; None if no error did."""
        files.on_room(self._wake_thread)

    # --- the main loop's

    def take(self, node: int, message: m.Output | m.RankEnded) -> None:
        """Queue output of a node, or the end of a rank's output."""
        if isinstance(message, m.RankEnded):
            rank = message.rank
            self._enqueue(lambda now: self._rank_ended(node, rank, now))
        else:
            self._enqueue(lambda now: self._write_output(node, message, now))

    def drop(self, node: int, size: int) -> None:
        """Drop ``size`` bytes of output that arrived too late. The node may send as many others."""
        self._enqueue(lambda _: self._paid(node, size))

    def begin_attempt(self, attempt: int) -> None:
        """Write output that is queued from now on to this attempt's directory."""
        self._enqueue(lambda _: self._files.begin_attempt(attempt))

    def forget(self, node: int) -> None:
        """End the output of a node whose connection has ended.

        A new connection starts with the full credit.
        """
        self._enqueue(lambda now: self._forget_node(node, now))

    def do(self, work: Callable[[], object]) -> None:
        """Queue work for this thread. If the thread has ended, run the work at once."""
        with self._changed:
            over = self._over
            if not over:
                self._work.append(lambda _: work())
                self._changed.notify()
        if over:
            work()

    def ask(self, work: Callable[[], T]) -> T | None:
        """Queue work and return its result; None if the work takes longer than ``_ANSWER_S``."""
        found: list[T] = []
        done = threading.Event()

        def answer() -> None:
            found.append(work())
            done.set()

        self.do(answer)
        done.wait(_ANSWER_S)
        return next(iter(found), None)

    def finish(self, *, bound_s: float, hurried: Callable[[], bool] = lambda: False) -> bool:
        """End the thread after the queued work. Return whether it ended in time.

        Time is up after ``bound_s``, or when ``hurried`` returns True.
        """
        with self._changed:
            self._ending = True
            self._changed.notify()
        until = time.monotonic() + bound_s
        while self.is_alive() and not hurried() and (left_s := until - time.monotonic()) > 0:
            self.join(min(left_s, LOOK_S))
        return not self.is_alive()

    # --- from other threads

    def _wake_thread(self) -> None:
        with self._changed:
            self._nudged = True
            self._changed.notify()

    def _enqueue(self, work: Callable[[float], object]) -> None:
        with self._changed:
            self._work.append(work)
            self._changed.notify()

    # --- this thread's

    def run(self) -> None:
        """Run the queued work until ``finish`` is called."""
        try:
            while self._serve():
                pass
        except Exception:  # noqa: BLE001 - whatever it is, the job has to know: the nodes would wait for credit for ever
            import traceback

            self.fault = traceback.format_exc()
        finally:
            with self._changed:
                self._over = True

    def _serve(self) -> bool:
        """Run the queued work, and wait if there is none. Return False when the thread has to
        end."""
        due = self._files.tick(time.monotonic())
        self._give_credit()
        with self._changed:
            if not self._work and not self._nudged and not self._ending:
                self._changed.wait(None if due is None else max(0.0, due - time.monotonic()))
            self._nudged = False
            work, self._work = self._work, deque()
            self._over = ending = self._ending and not work
        now = time.monotonic()
        for each in work:
            each(now)
        return not ending

    def _forget_node(self, node: int, now: float) -> None:
        self._taken.pop(node, None)
        for rank in sorted(self._open.pop(node, ())):
            self._files.rank_ended(rank, now)

    def _rank_ended(self, node: int, rank: int, now: float) -> None:
        self._open.get(node, set()).discard(rank)
        self._files.rank_ended(rank, now)

    def _write_output(self, node: int, message: m.Output, now: float) -> None:
        """Write output of a worker, and count it for the node's next credit."""
        self._open.setdefault(node, set()).add(message.rank)
        self._files.output(message.rank, message.stream, message.data, now)
        self._paid(node, len(message.data))

    def _paid(self, node: int, size: int) -> None:
        """Count bytes that were written or dropped, for the node's next credit."""
        self._taken[node] = self._taken.get(node, 0) + size

    def _give_credit(self) -> None:
        """Send new credit, in large units, to nodes whose output was written, while the console has
        room."""
        if not self._taken or not self._files.has_room():
            return
        for node, size in list(self._taken.items()):
            if size * _GRANT_AT >= self.window:
                del self._taken[node]
                self._grant(node, size)
