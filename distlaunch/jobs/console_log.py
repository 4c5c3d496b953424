"""Read ``console.log``, the console of a job that was started with --detach."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from distlaunch.core.model.run_files import CONSOLE
from distlaunch.jobs.job import Job

_BLOCK = 1 << 16
_SCREEN_BYTES = 1 << 20
"""The last screenful is looked for in this many bytes at the end."""


class ConsoleLog:
    """The console of a job, as far as it has been written. Must be closed."""

    def __init__(self, job: Job) -> None:
        """Open the file. Raises FileNotFoundError if the job has none, and OSError if it cannot be
        read as a file."""
        self._offset = 0
        self._path = os.path.join(job.path, CONSOLE)
        self._descriptor = _open_file(self._path)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def skip_to_last(self, lines: int) -> None:
        """Begin to read at the last ``lines`` lines; there is at least one."""
        end = os.fstat(self._descriptor).st_size
        start = max(0, end - _SCREEN_BYTES)
        last = os.pread(self._descriptor, end - start, start)
        place = len(last.removesuffix(b"\n"))
        for _ in range(lines):
            place = last.rfind(b"\n", 0, place)
            if place < 0:
                break
        self._offset = start + place + 1

    def read(self) -> bytes:
        """Return the next block, empty if there is nothing. The place to read stays until
        ``advance``."""
        block = os.pread(self._descriptor, _BLOCK, self._offset)
        if block or not self._has_successor():
            return block
        block = os.pread(self._descriptor, _BLOCK, self._offset)  # written just before
        if not block:
            with suppress(OSError):
                successor = _open_file(self._path)
                os.close(self._descriptor)
                self._descriptor, self._offset = successor, 0
                block = os.pread(self._descriptor, _BLOCK, 0)
        return block

    def _has_successor(self) -> bool:
        """Whether the launcher has begun a new file, because this one had reached its limit."""
        with suppress(OSError):
            return not os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        return False

    def advance(self, count: int) -> None:
        """Move the place to read on by ``count`` bytes."""
        self._offset += count


def _open_file(path: str) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return descriptor
