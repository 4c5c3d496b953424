"""Write the heartbeats of workers (step, loss, samples) to one file of the run directory.

The main loop collects the newest report of each rank, and hands a block of them to ``DiskWork`` at
most once per period. When the file reaches its limit, neighbouring blocks are merged and the period
is doubled. So the file has a bounded size, however long the job runs, and covers all of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from distlaunch.core.model.step_series import (
    MAGIC,
    Row,
    merge_blocks,
    pack_block,
    split_blocks,
)
from distlaunch.core.private_files import open_private

if TYPE_CHECKING:
    from distlaunch.coordinator.runtime.records import DiskWork
    from distlaunch.core.protocol import agent_messages as m

MOST_BYTES = 16 << 20
"""Largest size of the file."""
PERIOD_S = 1.0
"""Shortest time between two blocks at first. Workers' reports arrive once a second."""
_GATHER_S = 0.5
"""How long to wait for the reports of other nodes after the first."""
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class SeriesFile:
    """The file of one job.

    If the disk does not accept a block, the block is lost and the job continues. Its methods are
    called by the main loop; files are read and written in ``disk_work``.
    """

    def __init__(
        self,
        path: str,
        disk_work: DiskWork,
        *,
        first_rank: int = 0,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """``first_rank`` is the number that the file has for rank 0."""
        self._path = path
        self._disk_work = disk_work
        self._first_rank = first_rank
        self._most_bytes = most_bytes
        self._attempt = 0
        self._is_first = True
        """Whether no block of the attempt has been written."""
        self._rows: dict[int, Row] = {}
        self.due: float | None = None
        """When ``write`` is due, on the clock of ``now``; None if there is nothing to write."""
        self._written_at = float("-inf")
        self._period_s = PERIOD_S
        self._descriptor = -1
        self._size = 0
        self._is_broken = False

    def add(
        self, attempt: int, heartbeats: Iterable[m.Heartbeat], *, now: float, time: float
    ) -> None:
        """Keep the reports of some ranks for the next block.

        ``now`` is a monotonic time, ``time`` the same moment in seconds since 1970.
        """
        if attempt != self._attempt:
            self.write(now)
            self._attempt, self._is_first = attempt, True
        for heartbeat in heartbeats:
            values, rank = heartbeat.values, self._first_rank + heartbeat.rank
            if values:
                if self._is_first and rank in self._rows:
                    self.write(now)  # the first report of a rank tells when its steps began
                self._rows[rank] = (
                    rank,
                    time,
                    values.get("step"),
                    values.get("loss"),
                    values.get("samples"),
                )
        if self._rows and self.due is None:
            self.due = max(self._written_at + self._period_s, now + _GATHER_S)

    def write(self, now: float) -> None:
        """Write the reports that have been kept."""
        if self._rows:
            block = pack_block(self._attempt, [self._rows[rank] for rank in sorted(self._rows)])
            self._rows, self._is_first = {}, False
            self._written_at, self.due = now, None
            self._disk_work.do(lambda: self._append(block))

    def close(self) -> None:
        """Close the file after all blocks that have been handed over."""
        self._disk_work.do(self._close)

    # --- in ``disk_work``

    def _append(self, block: bytes) -> None:
        if self._is_broken:
            return
        try:
            if self._descriptor < 0:
                self._open()
            if self._size + len(block) > self._most_bytes:
                self._shrink()
            written = os.pwrite(self._descriptor, block, self._size)
            if written < len(block):
                os.ftruncate(self._descriptor, self._size)
                return
            self._size += written
        except OSError:
            self._is_broken = self._descriptor < 0

    def _open(self) -> None:
        """Open the file. A coordinator that continues a job appends to the file of the previous
        one."""
        descriptor = open_private(self._path, _OPEN)
        try:
            size = os.fstat(descriptor).st_size
            blocks = list(split_blocks(os.pread(descriptor, min(size, 2 * self._most_bytes), 0)))
            if not blocks:
                os.pwrite(descriptor, MAGIC, 0)
            self._size = len(MAGIC) + sum(map(len, blocks))
            os.ftruncate(descriptor, self._size)
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def _shrink(self) -> None:
        """Replace the file by one with half the blocks."""
        blocks = merge_blocks(list(split_blocks(os.pread(self._descriptor, self._size, 0))))
        while sum(map(len, blocks)) > self._most_bytes * 3 // 4:
            del blocks[: len(blocks) // 4 + 1]  # many short attempts, whose blocks do not merge
        data = MAGIC + b"".join(blocks)
        fresh = f"{self._path}.new"
        with suppress(FileNotFoundError):
            os.unlink(fresh)
        descriptor = open_private(fresh, _OPEN | os.O_EXCL)
        try:
            os.posix_fallocate(descriptor, 0, len(data))
            os.pwrite(descriptor, data, 0)
            os.replace(fresh, self._path)
        except OSError:
            os.close(descriptor)
            with suppress(OSError):
                os.unlink(fresh)
            raise
        os.close(self._descriptor)
        self._descriptor, self._size = descriptor, len(data)
        self._period_s *= 2

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._is_broken = True
