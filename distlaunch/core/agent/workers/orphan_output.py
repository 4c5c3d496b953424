"""Write the workers' output to the log files after their agent was killed. Runs in the spawner.

The spawner holds a copy of the read end of each worker's pipe. Without the copy, a worker that
prints in its TERM handler would get EPIPE, and could end before it has saved a checkpoint.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distlaunch.core.protocol import spawner_messages as w

if TYPE_CHECKING:
    import threading

    from distlaunch.core.agent.workers.output_pump import Pump

PROGRESS = 0
"""Stream number of a worker's progress pipe in ``read_ends``."""
_READ_OUT_S = 0.1
"""How long the agent may take to read an exited worker's pipe before the spawner checks it
again."""


class OrphanOutput:
    """Read ends of the workers' streams of one attempt. They are not read while the agent lives.

    A thread reads and writes: a file system that hangs must not prevent the spawner from killing
    processes.
    """

    def __init__(self) -> None:
        self._read_ends: dict[int, tuple[int, int]] = {}  # descriptor -> rank, stream
        self._of_rank: dict[int, Sequence[int]] = {}
        self._ended: set[int] = set()  # descriptors of ranks whose worker has exited
        self._unread: set[int] = set()  # those without a writer that the agent has not emptied
        self._thread: threading.Thread | None = None
        self._pump: Pump | None = None
        self._has_pump: threading.Event | None = None

    def add(self, rank: int, streams: Sequence[int], descriptors: Sequence[int]) -> None:
        """Own the read ends of a worker's streams from now on."""
        self._of_rank[rank] = descriptors
        self._read_ends.update(
            {each: (rank, stream) for stream, each in zip(streams, descriptors, strict=True)}
        )

    def on_exit(self, rank: int) -> None:
        """Record that a rank's worker has exited. Its read ends are closed once no process can
        write to them."""
        self._ended.update(self._of_rank.pop(rank, ()))

    @property
    def waits_for_writers(self) -> set[int]:
        """Descriptors of exited workers to poll until no process can write to them."""
        return self._ended - self._unread

    @property
    def timeout_s(self) -> float | None:
        """Seconds until ``close_finished`` is due even without a hang-up."""
        return _READ_OUT_S if self._unread else None

    def close_finished(self) -> None:
        """Close read ends of exited workers' pipes that no process can write to, once the agent has
        read all bytes.

        Unread bytes of a progress pipe are ignored.
        """
        if not self._ended:
            return
        poll = select.poll()
        for descriptor in self._ended:
            poll.register(descriptor, select.POLLIN)
        self._unread.clear()
        for descriptor, events in poll.poll(0):
            if not events & select.POLLHUP:
                continue
            if events & select.POLLIN and self._read_ends[descriptor][1] != PROGRESS:
                self._unread.add(descriptor)
            else:
                os.close(descriptor)
                self._ended.discard(descriptor)
                del self._read_ends[descriptor]

    def close(self) -> None:
        """Close all read ends at the end of the attempt."""
        for descriptor in self._read_ends:
            os.close(descriptor)
        self._read_ends.clear()
        self._of_rank.clear()
        self._ended.clear()
        self._unread.clear()

    def start(self, setup: w.Setup) -> None:
        """Start a thread that writes the workers' output to the log files. If none can be started,
        the pipes stay open unread."""
        import threading

        self._has_pump = threading.Event()
        thread = threading.Thread(target=self._serve, args=(setup, self._has_pump), daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return
        self._thread = thread

    def finish(self, *, bound_s: float) -> None:
        """Write the output that has arrived, and stop the thread. Gives up after ``bound_s``
        seconds."""
        if (
            self._thread is None
            or self._has_pump is None
            or not self._has_pump.wait(bound_s)
            or self._pump is None
        ):
            return
        self._pump.finish()
        self._pump.stop()
        self._thread.join(bound_s)

    def _serve(self, setup: w.Setup, has_pump: threading.Event) -> None:
        """Pump the workers' output to the log files until ``finish``. Without a log directory it is
        dropped."""
        from distlaunch.core.agent.workers.log_files import LogFiles
        from distlaunch.core.agent.workers.output_pump import Pump
        from distlaunch.core.agent.workers.output_sender import OutputSender

        sink = OutputSender(_discard)
        if setup.log_dir:
            logs = LogFiles(
                setup.log_dir, setup.attempt, _discard, layout=setup.layout, make_folders=True
            )
            sink.begin_attempt(logs)
        sink.on_coordinator_lost()
        pump = Pump(sink, _discard)
        for descriptor, (rank, stream) in self._read_ends.items():
            if stream != PROGRESS:
                pump.add(rank, stream, descriptor, tail_of=None)
        self._pump = pump
        has_pump.set()
        pump.run()


def _discard(_: object) -> None:
    """Discard a report: no coordinator is there to receive it."""
