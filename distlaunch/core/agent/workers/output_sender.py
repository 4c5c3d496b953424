"""Send output to a coordinator on another machine, which grants credit: a number of bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable

from distlaunch.core.agent.workers.log_files import LogFiles
from distlaunch.core.protocol import agent_messages as m


class OutputSender:
    """Sends chunks of output while credit is left, and optionally writes them to log files of the
    node.

    Without credit the pump stops reading, except for the last output of exited workers. This output
    counts against future credit.
    """

    def __init__(self, send: Callable[[m.FromAgent | m.Output | m.RankEnded], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._credit = 0
        self._lost = False
        self._wake: Callable[[], None] = _do_nothing
        self._logs: LogFiles | None = None
        self._run_dir_logs: LogFiles | None = None

    # --- called by the loop

    def grant(self, size: int) -> None:
        """Allow this many more bytes to be sent."""
        with self._lock:
            self._credit += size
            wake = self._credit > 0
        if wake:
            self._wake()

    def on_coordinator_lost(self, logs: LogFiles | None = None) -> None:
        """Accept all output and send nothing from now on, so that no worker waits for a lost
        coordinator.

        ``logs`` are the files of the run directory, to which the coordinator wrote.
        """
        with self._lock:
            self._run_dir_logs = logs
            self._lost = True
        self._wake()

    def begin_attempt(self, logs: LogFiles | None) -> None:
        """Write output also to these files from now on; None for no files."""
        self._logs = logs

    # --- called by the pump

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Write a chunk to the log files, and send it unless the coordinator is lost."""
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
        """Report that the output of a rank is complete."""
        if self._logs is not None:
            self._logs.rank_ended(rank, now)
        if self._run_dir_logs is not None:
            self._run_dir_logs.rank_ended(rank, now)
        self._send(m.RankEnded(rank=rank))

    def tick(self, now: float) -> float | None:
        """Return None: this sink has no deadlines."""
        return None

    def has_room(self) -> bool:
        """Return whether credit is left, or nothing is sent any more."""
        return self._credit > 0 or self._lost

    def on_room(self, wake: Callable[[], None]) -> None:
        """Set the function to call when new credit arrives."""
        self._wake = wake


def _do_nothing() -> None:
    """Do nothing until the pump has set its function."""
