"""Every rank's output in files. A full disk never stops a job."""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Callable

from distlaunch.core.model.run_files import STDERR, STDOUT, TRAIN, Layout
from distlaunch.core.private_files import make_private_dirs, open_private

RETRY_S = 5.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_LEAST_OPEN = 16
_File = tuple[int, int]
"""Rank and stream; 0 where both streams have one file."""


def open_to_append(path: str) -> int:
    """Open a log file, made if it is not there. Raises OSError if something else than a plain file
    is in its place."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = open_private(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a worker has put a pipe or device there
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file")
    return descriptor


class LogFiles:
    """The files of one attempt's output, opened as output comes; called by the output pump's
    thread.

    They take no more than half of the open files that we may have: the one that was written to
    least recently is closed for another, and opened again when there is more for it.

    ``trouble`` is called once, from that thread, when files stop, with the reason.
    ``make_folders``: the run directory and the attempt's are made as files are opened.
    """

    def __init__(
        self,
        run_dir: str,
        attempt: int,
        trouble: Callable[[str], None],
        *,
        layout: Layout = TRAIN,
        make_folders: bool = False,
    ) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._trouble = trouble
        self._layout = layout
        self._make_folders = make_folders
        self._told = False
        self._files: dict[_File, int] = {}
        self._missing: dict[_File, int] = {}  # bytes not filed
        self._retry_at: dict[_File, float] = {}

    def begin_attempt(self, attempt: int) -> None:
        """File into this attempt's folder from now on; what is open of an earlier one is closed."""
        for rank in {rank for rank, _ in (*self._files, *self._missing)}:
            self.rank_ended(rank, 0.0)
        self._attempt = attempt

    def open(self, rank: int, stream: int) -> int:
        """Open the file of a rank's stream. Raises OSError."""
        return open_to_append(self._layout.log_path(self._run_dir, self._attempt, rank, stream))

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """File a chunk; what the disk does not take is counted, and told in the file when it takes
        more."""
        self._file((rank, stream if self._layout.separate else 0), data, now)

    def rank_ended(self, rank: int, now: float) -> None:
        """Close the rank's files."""
        for file in ((rank, STDOUT), (rank, STDERR)) if self._layout.separate else ((rank, 0),):
            if file in self._missing:
                self._retry_at[file] = now
                self._file(
                    file, b"", now
                )  # says how much is missing, if there is room for that by now
            descriptor = self._files.pop(file, -1)
            if descriptor >= 0:
                os.close(descriptor)
            self._retry_at.pop(file, None)
            self._missing.pop(file, None)

    def _file(self, file: _File, data: bytes, now: float) -> None:
        if file in self._missing and now < self._retry_at[file]:
            self._missing[file] += len(data)
            return
        written = 0
        try:
            descriptor = self._files.pop(file, -1)
            if descriptor < 0:
                descriptor = self._opened(file)
            self._files[file] = descriptor  # as the newest
            if gap := self._missing.get(file):
                os.write(descriptor, f"\n[distlaunch: {gap} bytes are missing here]\n".encode())
                del self._missing[file]
            while written < len(data):
                written += os.write(descriptor, data[written:] if written else data)
        except OSError as exc:
            self._missing[file] = self._missing.get(file, 0) + len(data) - written
            self._retry_at[file] = now + RETRY_S
            if not self._told:
                self._told = True
                self._trouble(
                    "the disk is full" if exc.errno in _FULL else os.strerror(exc.errno or 0)
                )

    def _opened(self, file: _File) -> int:
        if self._make_folders:
            for folder in (self._run_dir, self._layout.attempt_dir(self._run_dir, self._attempt)):
                make_private_dirs(folder)
        self._leave(_most_open() - 1)
        try:
            return self.open(*file)
        except OSError as exc:
            if exc.errno not in _TOO_MANY or not self._files:
                raise
        self._leave(len(self._files) // 2)  # others than us have many open
        return self.open(*file)

    def _leave(self, most: int) -> None:
        """Leave so many files open, those that were written to last."""
        while len(self._files) > most:
            os.close(self._files.pop(next(iter(self._files))))


def _most_open() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else max(_LEAST_OPEN, soft // 2)
