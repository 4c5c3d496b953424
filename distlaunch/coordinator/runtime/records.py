"""What a run directory keeps: ``events.jsonl`` and every rank's output. A full disk never stops a
job.

Lines of several ranks picked into one file, as torchrun's --duplicate-stdout-filters does.

Who does the work that may wait for a disk: the main loop itself, or a thread beside it.

Where nodes are reached by connections, a loop that stands still for a few seconds loses them all: no ping
is answered.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from distlaunch.coordinator.runtime.sink import Sink
from distlaunch.core.agent.workers.log_files import LogFiles, open_to_append
from distlaunch.core.model.run_files import STDERR, STDOUT, TRAIN, Layout
from distlaunch.core.private_files import make_private_dir

EVENTS_SCHEMA = 1
"""Raised when a field of an event changes its meaning or goes away; new fields do not count."""


class EventLog:
    """Appends one JSON object a line: ``{"time": seconds since the epoch, "type": ..., ...}``.

    The first one also has ``schema``.
    """

    def __init__(
        self, descriptor: int, sink: Sink, *, desk: Desk | None = None, first_rank: int = 0
    ) -> None:
        """``first_rank``: what rank 0 is called in events."""
        self._descriptor = descriptor
        self._sink = sink
        self._desk = desk or Desk()
        self._first_rank = first_rank
        self._schema = {"schema": EVENTS_SCHEMA}
        """For the next event: empty after the first."""

    def write(self, kind: str, fields: Mapping[str, object]) -> None:
        """Add an event; what the disk does not take is lost here, never in the job."""
        shown = self._counted(fields) if self._first_rank else fields
        record = {"time": round(time.time(), 6), "type": kind, **self._schema, **shown}
        self._schema = {}
        line = json.dumps(record).encode("ascii") + b"\n"
        self._desk.do(lambda: self._append(line))
        self._sink.event(record)

    def _append(self, line: bytes) -> None:
        with suppress(OSError):
            os.write(self._descriptor, line)

    def _counted(self, fields: Mapping[str, object]) -> dict[str, object]:
        """Name ranks as people know them, also in records within."""
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
    """Files every byte, then hands it to the console: the taker of the output pump, called by its
    thread.

    ``begin_attempt`` is the main thread's, at a moment when no output is under way.

    ``trouble`` is called once, from that thread, when files stop. ``ranks`` are those whose folders
    are made, where the layout has such; ``filters`` pick lines of a stream into a file of their
    own.
    """

    def __init__(
        self,
        run_dir: str,
        sink: Sink,
        trouble: Callable[[str], None],
        *,
        layout: Layout = TRAIN,
        ranks: Sequence[int] = (),
        filters: Mapping[int, LineFilter] | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._sink = sink
        self._layout = layout
        self.ranks = ranks
        """Of this launcher; another launcher of the job may have others from attempt to attempt."""
        self._filters = filters or {}
        self._open: set[int] = set()  # ranks that may say more
        self._logs = LogFiles(
            run_dir,
            0,
            lambda why: trouble(f"log files have stopped: {why} ({run_dir}); the job goes on"),
            layout=layout,
        )

    def begin_attempt(self, attempt: int) -> None:
        """File into this attempt's folder from now on; whoever has not ended of an earlier one, has
        now."""
        for rank in sorted(self._open):
            self.rank_ended(rank, time.monotonic())
        self._logs.begin_attempt(attempt)
        for rank in self.ranks if self._layout.folder else ():
            with suppress(OSError):  # told when there is output to file
                make_private_dir(self._layout.rank_dir(self._run_dir, attempt, rank))
                for stream in (STDOUT, STDERR):  # there from the start, for whoever follows them
                    os.close(self._logs.open(rank, stream))
        for stream, lines in self._filters.items():
            lines.begin(self._layout.filtered_path(self._run_dir, attempt, stream))

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Take a chunk."""
        self._open.add(rank)
        self._logs.output(rank, stream, data, now)
        if stream in self._filters:
            self._filters[stream].output(rank, data)
        self._sink.output(rank, stream, data, now)

    def rank_ended(self, rank: int, now: float) -> None:
        """Close the rank's files."""
        self._open.discard(rank)
        self._logs.rank_ended(rank, now)
        for lines in self._filters.values():
            lines.rank_ended(rank)
        self._sink.rank_ended(rank, now)

    def close(self) -> None:
        """Close what is of no rank; no output is under way any more."""
        for lines in self._filters.values():
            lines.close()

    def tick(self, now: float) -> float | None:
        """Let the console show what it has held long enough."""
        return self._sink.tick(now)

    def has_room(self) -> bool:
        """Ask the console."""
        return self._sink.has_room()

    def on_room(self, wake: Callable[[], None]) -> None:
        """Ask the console."""
        self._sink.on_room(wake)


_LONGEST_LINE = 64 << 10


class LineFilter:
    """Copies whole lines that contain one of ``needles``, with their rank's prefix; called by the
    pump's thread.

    ``prefixes`` has the ranks whose lines count. A line of more than 64 KiB is looked at in parts.
    What the disk does not take is missing in this copy only: the rank's own file has every byte,
    and says when it has not.
    """

    def __init__(self, needles: Sequence[bytes], prefixes: Mapping[int, bytes]) -> None:
        self._needles = tuple(needles)
        self._prefixes = prefixes
        self._begun: dict[int, bytes] = {}
        self._descriptor = -1
        self.first_rank = 0
        """``prefixes`` counts from this rank on."""
        self.suffix = ""
        """What the file's name has beside that of the other launchers of the job."""

    def begin(self, path: str) -> None:
        """Write to this file from now on."""
        self.close()
        stem, dot, ending = path.rpartition(".")
        path = f"{stem}{self.suffix}{dot}{ending}"
        try:
            self._descriptor = open_to_append(path)
        except OSError:
            self._descriptor = -1

    def output(self, rank: int, data: bytes) -> None:
        """Take a chunk."""
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
        """Look at a last line without its newline."""
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


class Desk:
    """Does everything at once, as on one machine, where nobody waits for the loop."""

    def do(self, work: Callable[[], object]) -> None:
        """Do this, after what was handed over before; its OSErrors are its own affair."""
        work()

    def ask(self, work: Callable[[], T]) -> T | None:
        """Do this as well, and give what it gives; None if that takes longer than the loop may
        wait."""
        return work()
