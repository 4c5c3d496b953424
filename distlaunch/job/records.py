"""Layer job: what a run directory keeps: ``events.jsonl`` and every rank's output. A full disk never stops a job."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from distlaunch.core.model.layout import log_path
from distlaunch.job.sink import Sink

_RETRY_S = 5.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


class EventLog:
    """Appends one JSON object a line: ``{"time": seconds since the epoch, "type": ..., ...}``."""

    def __init__(self, descriptor: int, sink: Sink) -> None:
        self._descriptor = descriptor
        self._sink = sink

    def write(self, kind: str, fields: Mapping[str, object]) -> None:
        """Add an event; what the disk does not take is lost here, never in the job."""
        record = {"time": round(time.time(), 6), "type": kind, **fields}
        with suppress(OSError):
            os.write(self._descriptor, json.dumps(record).encode("ascii") + b"\n")
        self._sink.event(record)


class OutputFiles:
    """Files every byte, then hands it to the console: the taker of the output pump, called by its thread.

    ``begin_attempt`` is the main thread's, at a moment when no output is under way.

    ``trouble`` is called once, from that thread, when files stop.
    """

    def __init__(self, run_dir: str, sink: Sink, trouble: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._sink = sink
        self._trouble = trouble
        self._told = False
        self._attempt = 0
        self._files: dict[int, int] = {}
        self._missing: dict[int, int] = {}  # rank -> bytes not filed
        self._retry_at: dict[int, float] = {}

    def begin_attempt(self, attempt: int) -> None:
        """File into this attempt's folder from now on; no output of an earlier one is under way."""
        self._attempt = attempt

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Take a chunk."""
        self._file(rank, data, now)
        self._sink.output(rank, stream, data, now)

    def rank_ended(self, rank: int, now: float) -> None:
        """Close the rank's file."""
        if rank in self._missing:
            self._retry_at[rank] = now
            self._file(rank, b"", now)  # says how much is missing, if there is room for that by now
        descriptor = self._files.pop(rank, -1)
        if descriptor >= 0:
            os.close(descriptor)
        self._retry_at.pop(rank, None)
        self._missing.pop(rank, None)
        self._sink.rank_ended(rank, now)

    def tick(self, now: float) -> float | None:
        """Let the console show what it has held long enough."""
        return self._sink.tick(now)

    def has_room(self) -> bool:
        """Ask the console."""
        return self._sink.has_room()

    def on_room(self, wake: Callable[[], None]) -> None:
        """Ask the console."""
        self._sink.on_room(wake)

    def _file(self, rank: int, data: bytes, now: float) -> None:
        if rank in self._missing and now < self._retry_at[rank]:
            self._missing[rank] += len(data)
            return
        written = 0
        try:
            descriptor = self._files.get(rank, -1)
            if descriptor < 0:
                descriptor = self._files[rank] = self._open(rank)
            if gap := self._missing.get(rank):
                os.write(descriptor, f"\n[distlaunch: {gap} bytes are missing here]\n".encode())
                del self._missing[rank]
            while written < len(data):
                written += os.write(descriptor, data[written:] if written else data)
        except OSError as exc:
            self._missing[rank] = self._missing.get(rank, 0) + len(data) - written
            self._retry_at[rank] = now + _RETRY_S
            if not self._told:
                self._told = True
                why = "the disk is full" if exc.errno in _FULL else os.strerror(exc.errno or 0)
                self._trouble(f"log files have stopped: {why} ({self._run_dir}); the job goes on")

    def _open(self, rank: int) -> int:
        path = log_path(self._run_dir, self._attempt, rank)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o600)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a worker has put a pipe or device there
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a plain file")
        return descriptor
