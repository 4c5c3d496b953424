"""Write the files of a run directory: ``events.jsonl`` and the output of every rank.

A full disk never stops a job. ``LineFilter`` copies lines of several ranks into one file, as
torchrun's --duplicate-stdout-filters does. ``DiskWork`` runs work that may wait for a disk. On one
machine the work runs in the main loop. With several nodes it runs in a thread: a main loop that is
blocked for a few seconds answers no pings, and all nodes would be considered lost.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from distlaunch.coordinator.policy.advisory import Advisory, AdvisoryPart
from distlaunch.coordinator.runtime.sink import Sink
from distlaunch.core.agent.workers.log_files import LogFiles, open_to_append
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.run_files import STDERR, STDOUT, TRAIN, Layout
from distlaunch.core.private_files import make_private_dir

EVENTS_SCHEMA = 1
"""Increased when a field of an event changes its meaning or is removed. New fields do not count."""


class EventLog:
    """Appends one JSON object per line: ``{"time": seconds since the epoch, "type": ..., ...}``.

    The first object also has ``schema``.
    """

    def __init__(
        self, descriptor: int, sink: Sink, *, disk_work: DiskWork | None = None, first_rank: int = 0
    ) -> None:
        """``first_rank`` is the number that events show for rank 0."""
        self._descriptor = descriptor
        self._sink = sink
        self._disk_work = disk_work or DiskWork()
        self._first_rank = first_rank
        self._schema = {"schema": EVENTS_SCHEMA}
        """Additional fields of the next event. Empty after the first event."""
        self._observers: list[Callable[[Mapping[str, object]], None]] = []

    def add_observer(self, observe: Callable[[Mapping[str, object]], None]) -> None:
        """Call ``observe`` with each event from now on, in the thread that writes the event.

        ``observe`` must not block and must not raise.
        """
        self._observers.append(observe)

    def write(self, kind: str, fields: Mapping[str, object]) -> None:
        """Append an event of type ``kind``, and pass it to the sink and the observers.

        An event that cannot be written is lost in the file, and the job continues.
        """
        shown = self._counted(fields) if self._first_rank else fields
        record = {"time": round(time.time(), 6), "type": kind, **self._schema, **shown}
        self._schema = {}
        line = json.dumps(record).encode("ascii") + b"\n"
        self._disk_work.do(lambda: self._append(line))
        self._sink.event(record)
        for observe in self._observers:
            observe(record)

    def _append(self, line: bytes) -> None:
        with suppress(OSError):
            os.write(self._descriptor, line)

    def _counted(self, fields: Mapping[str, object]) -> dict[str, object]:
        """Return the fields with all rank numbers counted from ``first_rank``, in nested records as
        well."""
        shown = dict(fields)
        for name, value in fields.items():
            match value:
                case int() if name == "rank":
                    shown[name] = self._first_rank + value
                case list() | tuple() if name == "ranks":
                    shown[name] = [self._first_rank + rank for rank in value]
                case dict() if name == "pids":
                    shown[name] = {self._first_rank + rank: pid for rank, pid in value.items()}
                case dict():
                    shown[name] = self._counted(value)
        return shown


class OutputFiles:
    """Writes output to the log files, then to the console.

    ``output``, ``rank_ended`` and ``tick`` are called by the output pump's thread. The main thread
    calls ``begin_attempt`` while no output arrives. ``on_error`` is called from the pump's thread,
    once when log files can no longer be written, and once when one has reached its limit.
    ``ranks``: the ranks whose directories are created, if the layout has directories. ``filters``
    copy lines of a stream into separate files.
    """

    def __init__(
        self,
        run_dir: str,
        sink: Sink,
        on_error: Callable[[str], None],
        *,
        layout: Layout = TRAIN,
        ranks: Sequence[int] = (),
        filters: Mapping[int, LineFilter] | None = None,
        on_output: Callable[[int], None] | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._sink = sink
        self._layout = layout
        self.ranks = ranks
        """The ranks of this launcher. With several launchers they may differ in each attempt."""
        self._filters = filters or {}
        self._on_output = on_output
        """Is called with the size of each chunk."""
        self.output_bytes = 0
        """How much output has come, in all attempts."""
        self._open: set[int] = set()  # ranks whose output has not ended
        self._logs = LogFiles(
            run_dir,
            0,
            lambda why: on_error(f"log files have stopped: {why} ({run_dir}); the job goes on"),
            layout=layout,
            on_limit=lambda rank: on_error(
                f"the log of rank {rank} has reached {Opt.LOG_MAX_SIZE}: of this and all further such "
                "logs, the first half and the last part are kept"
            ),
        )

    def begin_attempt(self, attempt: int) -> None:
        """Write to this attempt's directory from now on. The output of the previous attempt is
        complete."""
        for rank in sorted(self._open):
            self.rank_ended(rank, time.monotonic())
        self._logs.begin_attempt(attempt)
        for rank in self.ranks if self._layout.folder else ():
            with suppress(OSError):  # reported when there is output to write
                make_private_dir(self._layout.rank_dir(self._run_dir, attempt, rank))
                for stream in (STDOUT, STDERR):  # made at the start, so that they can be followed
                    os.close(self._logs.open(rank, stream))
        for stream, lines in self._filters.items():
            lines.begin(self._layout.filtered_path(self._run_dir, attempt, stream))

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Write a chunk to the log file and the filter's file, and pass it to the console."""
        self._open.add(rank)
        self.output_bytes += len(data)
        self._logs.output(rank, stream, data, now)
        if stream in self._filters:
            self._filters[stream].output(rank, data)
        self._sink.output(rank, stream, data, now)
        if self._on_output is not None:
            self._on_output(len(data))

    def rank_ended(self, rank: int, now: float) -> None:
        """Close the rank's files, and let the console show its last line."""
        self._open.discard(rank)
        self._logs.rank_ended(rank, now)
        for lines in self._filters.values():
            lines.rank_ended(rank)
        self._sink.rank_ended(rank, now)

    def close(self) -> None:
        """Close the filters' files. Called after the last output."""
        for lines in self._filters.values():
            lines.close()

    def tick(self, now: float) -> float | None:
        """Let the console show the lines that have been held long enough. Return the time of the
        next call, or None."""
        return self._sink.tick(now)

    def has_room(self) -> bool:
        """Return whether the pump may continue reading, because the console has room."""
        return self._sink.has_room()

    def on_room(self, wake: Callable[[], None]) -> None:
        """Set the function to call, from any thread, each time ``has_room`` changes to True, or if
        ``tick`` is due earlier."""
        self._sink.on_room(wake)


_LONGEST_LINE = 64 << 10


class LineFilter:
    """Copies lines that contain one of ``needles``, with the prefix of their rank.

    Called by the output pump's thread. ``prefixes`` has the prefixes of the ranks whose lines are
    copied. A line of more than 64 KiB is searched in pieces. If a line cannot be written, it is
    missing only in this copy.
    """

    def __init__(self, needles: Sequence[bytes], prefixes: Mapping[int, bytes]) -> None:
        self._needles = tuple(needles)
        self._prefixes = prefixes
        self._begun: dict[int, bytes] = {}
        self._descriptor = -1
        self.first_rank = 0
        """The rank that is number 0 in ``prefixes``."""
        self.suffix = ""
        """Suffix of the file's name, so that the files of several launchers have different
        names."""

    def begin(self, path: str) -> None:
        """Write to the file ``path`` with ``suffix`` in its name from now on. If it cannot be
        opened, nothing is written."""
        self.close()
        stem, dot, ending = path.rpartition(".")
        path = f"{stem}{self.suffix}{dot}{ending}"
        try:
            self._descriptor = open_to_append(path)
        except OSError:
            self._descriptor = -1

    def output(self, rank: int, data: bytes) -> None:
        """Process a chunk of a rank's output, and write the complete lines that match to the
        filter's file."""
        if rank - self.first_rank not in self._prefixes:
            return
        *lines, rest = (self._begun.pop(rank, b"") + data).split(b"\n")
        self._write(rank, lines)
        if len(rest) > _LONGEST_LINE:
            self._write(rank, [rest])
            rest = b""
        if rest:
            self._begun[rank] = rest

    def rank_ended(self, rank: int) -> None:
        """Write the rank's last line if the line matches and has no newline."""
        if rest := self._begun.pop(rank, b""):
            self._write(rank, [rest])

    def close(self) -> None:
        """Close the file."""
        self._begun.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, rank: int, lines: Sequence[bytes]) -> None:
        prefix = self._prefixes[rank - self.first_rank]
        picked = [
            prefix + line + b"\n"
            for line in lines
            if any(needle in line for needle in self._needles)
        ]
        if not picked or self._descriptor < 0:
            return
        data = b"".join(picked)
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            return


T = TypeVar("T")


class DiskWork:
    """Runs work that may wait for a disk. This class runs the work at once, in the calling
    thread."""

    def do(self, work: Callable[[], object]) -> None:
        """Run ``work`` at once; in the subclass with a thread, after all earlier work. ``work``
        must handle its OSErrors itself."""
        work()

    def ask(self, work: Callable[[], T]) -> T | None:
        """Run ``work`` and return its result. A subclass with a thread returns None if that takes
        longer than the main loop may wait."""
        return work()


class GuardedDiskWork(DiskWork):
    """Passes work on to ``inner``. A fault in the work is one of ``part``, and not of the thread that
    runs it."""

    def __init__(self, inner: DiskWork, advisory: Advisory, part: AdvisoryPart) -> None:
        self._inner = inner
        self._advisory = advisory
        self._part = part

    def do(self, work: Callable[[], object]) -> None:
        """Run ``work`` after all earlier work."""
        self._inner.do(lambda: self._advisory.call(self._part, None, work))

    def ask(self, work: Callable[[], T]) -> T | None:
        """Run ``work`` and return its result; None after a fault, too."""
        instead: T | None = None
        return self._inner.ask(lambda: self._advisory.call(self._part, instead, work))
