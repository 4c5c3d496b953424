"""Output on its way to a coordinator on another machine, no more of it than that has asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable

from distlaunch.core.agent.workers.log_files import LogFiles
from distlaunch.core.protocol import agent_messages as m


class OutputSender:
    """Sends chunks as they come while there is credit; files them on the node, too, if that is
    wanted.

    The pump stops reading when the credit is used up. What it reads all the same (the last words of
    workers that have ended, bounded by their pipes) is sent on credit to come.
    """

    def __init__(self, send: Callable[[m.FromAgent | m.Output | m.RankEnded], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._credit = 0
        self._lost = False
        self._wake: Callable[[], None] = _nobody
        self._logs: LogFiles | None = None
        self._run_dir_logs: LogFiles | None = None

    # --- the loop's

    def grant(self, size: int) -> None:
        """Let so many more bytes be sent."""
        with self._lock:
            self._credit += size
            wake = self._credit > 0
        if wake:
            self._wake()

    def lose(self, logs: LogFiles | None = None) -> None:
        """Take everything from now on and send nothing: a worker must not wait for a coordinator
        that is lost.

        ``logs``: the files of the run directory, which the lost coordinator wrote to.
        """
        with self._lock:
            self._run_dir_logs = logs
            self._lost = True
        self._wake()

    def begin_attempt(self, logs: LogFiles | None) -> None:
        """File output in these files, too; none of an earlier attempt is under way."""
        self._logs = logs

    # --- the pump's

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Take a chunk."""
        if self._logs is not None:
            self._logs.output(rank, stream, data, now)
        with self._lock:
            self._credit -= len(data)
            lost = self._lost
        if lost and self._run_dir_logs is not None:
            self._run_dir_logs.output(rank, stream, data, now)
        if not lost:
            self._send(m.Output(rank=rank, stream=stream, data=data))

    def rank_ended(self, rank: int, now: float) -> None:
        """Know that no more will come from a rank in this attempt."""
        if self._logs is not None:
            self._logs.rank_ended(rank, now)
        if self._run_dir_logs is not None:
            self._run_dir_logs.rank_ended(rank, now)
        self._send(m.RankEnded(rank=rank))

    def tick(self, now: float) -> float | None:
        """Nothing comes due here."""
        return None

    def has_room(self) -> bool:
        """Return whether there is credit."""
        return self._credit > 0 or self._lost

    def on_room(self, wake: Callable[[], None]) -> None:
        """Set what is to be called when there is credit again."""
        self._wake = wake


def _nobody() -> None:
    """Stand in for the pump until it is there."""
