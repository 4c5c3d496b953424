"""Write the output of each rank to files. A full disk never stops a job."""

from __future__ import annotations

import errno
import os
import resource
import stat
import time
from collections.abc import Callable
from contextlib import suppress

from distlaunch.core.model import log_limit, log_times
from distlaunch.core.model.run_files import STDERR, STDOUT, TRAIN, Layout, times_path
from distlaunch.core.private_files import make_private_dirs, open_private

RETRY_S = 5.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_LEAST_OPEN = 16
_File = tuple[int, int]
"""Rank and stream. The stream is 0 if both streams share a file."""


def open_to_append(path: str) -> int:
    """Open or create a log file and return its descriptor. Raises OSError if it is no regular
    file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = open_private(path, flags)
    # a worker may have put a pipe or device there
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file")
    return descriptor


class LogFiles:
    """The log files of one attempt. The output pump's thread opens a file when output arrives.

    At most half of the files that this process may open are used. The file with the least recent
    output is closed first, and opened again when needed.

    ``on_failure`` is called once, in that thread, with the reason if output cannot be written. With
    ``make_folders``, missing directories are created. ``on_limit`` is called once, with the rank
    whose file is the first to reach ``layout.log_bytes``.
    """

    def __init__(
        self,
        run_dir: str,
        attempt: int,
        on_failure: Callable[[str], None],
        *,
        layout: Layout = TRAIN,
        make_folders: bool = False,
        on_limit: Callable[[int], None] | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._on_failure = on_failure
        self._layout = layout
        self._make_folders = make_folders
        self._on_limit = on_limit
        self._gaps: dict[_File, log_limit.Gap] = {}
        """Of the open files that have left out bytes."""
        self._has_failed = False
        self._files: dict[_File, int] = {}
        self._missing: dict[_File, int] = {}  # bytes that were not written
        self._retry_at: dict[_File, float] = {}
        self._sizes: dict[_File, int] = {}
        """Of the open files, in bytes."""
        self._mark_at: dict[_File, float] = {}
        """When a file gets its next mark in the index of times, on the clock of ``now``."""
        self._index = -1

    def begin_attempt(self, attempt: int) -> None:
        """Close the files of the previous attempt. Later calls mean this attempt's files."""
        for rank in {rank for rank, _ in (*self._files, *self._missing)}:
            self.rank_ended(rank, 0.0)
        self._attempt = attempt

    def open(self, rank: int, stream: int) -> int:
        """Open the file of a rank's stream and return its descriptor, which the caller closes.
        Raises OSError."""
        return open_to_append(self._layout.log_path(self._run_dir, self._attempt, rank, stream))

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Write a chunk of output that came at the monotonic time ``now``.

        Bytes that the disk does not accept are counted, and the number is written to the file
        later.
        """
        self._write_chunk((rank, stream if self._layout.separate else 0), data, now)

    def rank_ended(self, rank: int, now: float) -> None:
        """Close the rank's files."""
        for file in ((rank, STDOUT), (rank, STDERR)) if self._layout.separate else ((rank, 0),):
            if file in self._missing:
                self._retry_at[file] = now
                self._write_chunk(
                    file, b"", now
                )  # writes how much is missing, if the disk accepts it by now
            descriptor = self._files.pop(file, -1)
            if descriptor >= 0:
                os.close(descriptor)
            self._retry_at.pop(file, None)
            self._missing.pop(file, None)
            self._sizes.pop(file, None)
            self._mark_at.pop(file, None)
            self._gaps.pop(file, None)
        if not self._files:
            self._close_index()

    def _close_index(self) -> None:
        if self._index >= 0:
            os.close(self._index)
            self._index = -1

    def _mark(self, file: _File, now: float) -> None:
        """Write to the index that the next byte of a file comes now. A mark that cannot be written
        is missing."""
        self._mark_at[file] = now + log_times.STEP_S
        rank, stream = file
        gap = self._gaps.get(file)
        offset = self._sizes[file] + (0 if gap is None else gap.shift)
        mark = log_times.Mark(time=time.time(), rank=rank, stream=stream, offset=offset)
        with suppress(OSError):
            if self._index < 0:
                self._index = open_to_append(times_path(self._run_dir, self._attempt))
            os.write(self._index, mark.pack())

    def _write_chunk(self, file: _File, data: bytes, now: float) -> None:
        """Write a chunk to a file. After an error, count it as missing and try again after
        ``RETRY_S``."""
        if file in self._missing and now < self._retry_at[file]:
            self._missing[file] += len(data)
            return
        written = 0
        try:
            descriptor = self._files.pop(file, -1)
            if descriptor < 0:
                descriptor = self._open_file(file)
            self._files[file] = descriptor  # move to the end
            if now >= self._mark_at.get(file, now):
                self._mark(file, now)
            if gap := self._missing.get(file):
                notice = f"\n[distlaunch: {gap} bytes are missing here]\n".encode()
                self._sizes[file] += os.write(descriptor, notice)
                del self._missing[file]
            while written < len(data):
                written += os.write(descriptor, data[written:] if written else data)
            self._sizes[file] += written
            if 0 < self._layout.log_bytes <= self._sizes[file]:
                self._shorten(file, descriptor)
        except OSError as exc:
            if file in self._sizes:
                self._sizes[file] += written
            self._missing[file] = self._missing.get(file, 0) + len(data) - written
            self._retry_at[file] = now + RETRY_S
            if not self._has_failed:
                self._has_failed = True
                self._on_failure(
                    "the disk is full" if exc.errno in _FULL else os.strerror(exc.errno or 0)
                )

    def _shorten(self, file: _File, descriptor: int) -> None:
        """Leave out the middle of a file that has reached its limit.

        If that fails, the file grows until the next chunk.
        """
        # Writing at an offset is not possible with O_APPEND.
        with suppress(OSError), open(f"/proc/self/fd/{descriptor}", "r+b", buffering=0) as writable:
            self._sizes[file], self._gaps[file] = log_limit.shorten(
                writable.fileno(),
                self._sizes[file],
                self._layout.log_bytes,
                self._gaps.get(file),
            )
            if self._on_limit is not None:
                self._on_limit(file[0])
                self._on_limit = None

    def _find_gap(self, file: _File, descriptor: int) -> None:
        """Find out whether a file that was opened again has left out bytes."""
        self._gaps.pop(file, None)
        if 0 < self._layout.log_bytes // 2 < self._sizes[file]:
            with suppress(OSError), open(f"/proc/self/fd/{descriptor}", "rb", buffering=0) as file_:
                gap = log_limit.find_gap(file_.fileno(), self._layout.log_bytes)
                if gap is not None:
                    self._gaps[file] = gap

    def _open_file(self, file: _File) -> int:
        if self._make_folders:
            for folder in (self._run_dir, self._layout.attempt_dir(self._run_dir, self._attempt)):
                make_private_dirs(folder)
        self._close_oldest(_most_open() - 1)
        try:
            descriptor = self.open(*file)
        except OSError as exc:
            if exc.errno not in _TOO_MANY or not self._files:
                raise
            self._close_oldest(len(self._files) // 2)  # other processes have opened many
            descriptor = self.open(*file)
        self._sizes[file] = os.fstat(descriptor).st_size
        self._find_gap(file, descriptor)
        return descriptor

    def _close_oldest(self, most: int) -> None:
        """Close the least recently written files, until ``most`` are open."""
        while len(self._files) > most:
            os.close(self._files.pop(next(iter(self._files))))


def _most_open() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else max(_LEAST_OPEN, soft // 2)
