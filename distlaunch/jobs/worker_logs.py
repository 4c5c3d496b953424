"""Read the log files of a job's ranks."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

from distlaunch.core.model import log_limit, log_times
from distlaunch.core.model.record import Record
from distlaunch.core.model.run_files import STDERR, STDOUT, times_path
from distlaunch.jobs.events import POLL_S
from distlaunch.jobs.job import Job, read_job

_BLOCK = 1 << 18
_LAST_BLOCK = 1 << 14
"""Read first at the end of a file."""
_LONGEST_LINE = 1 << 20
"""A longer line is shown in parts."""
_MOST_INDEX_BYTES = 1 << 30


class LogSource(Protocol):
    """Reads log files that are not on this host."""

    def size(self, file: LogFile) -> int:
        """Return the size of a file in bytes."""

    def blocks(self, file: LogFile, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of a part of a file, as far as they can be read."""

    def gap(self, file: LogFile) -> log_limit.Gap | None:
        """Return where a file has left out bytes; None if it has not."""

    def marks(
        self, files: Sequence[LogFile], starts: Mapping[str, int] | None, since: float | None
    ) -> tuple[list[log_times.Mark], bool]:
        """Return the marks of these files, and whether those before them are left out.

        With ``starts`` (by path), marks before these offsets may be left out; with ``since``, marks
        before this time.
        """


class LogFile(Record):
    """A file with output of one rank."""

    path: str
    rank: int
    stream: int
    """STDOUT or STDERR; 0 for a file with both."""
    source: LogSource | None = None
    """What reads the file if it is not on this host. ``path`` is only a name then."""


FindFiles = Callable[[int, Collection[int] | None], list[LogFile]]
"""Returns the log files of ranks in an attempt, ordered by rank and stream."""


class Line(Record):
    """A line of a rank."""

    rank: int
    text: bytes
    """Without its newline."""


class _Segment(Record):
    """Bytes that came within one step of the index of times."""

    time: float
    file: LogFile
    start: int
    end: int


def attempts_of(job: Job) -> list[int]:
    """Return the attempts that have a directory, in order."""
    numbers = [
        number for name in _names_in(job.path) if (number := _attempt_number(name)) is not None
    ]
    return sorted(numbers)


def log_files(job: Job, attempt: int, ranks: Collection[int] | None = None) -> list[LogFile]:
    """Return the log files of an attempt, ordered by rank and stream, in any layout."""
    folder = _attempt_directory(job, attempt)
    if folder is None:
        return []
    found = []
    for name in _names_in(folder):
        path = os.path.join(folder, name)
        if name.startswith("rank-") and name.endswith(".log"):
            found.append((name[len("rank-") : -len(".log")], path, 0))
            continue
        number = name.removeprefix("rank.")
        for file, stream in _STREAMS.items():
            if number.isdecimal() and os.path.isfile(os.path.join(path, file)):
                found.append((number, os.path.join(path, file), stream))
    files = [
        LogFile(path=path, rank=int(number), stream=stream)
        for number, path, stream in found
        if number.isdecimal()
    ]
    chosen = [file for file in files if ranks is None or file.rank in ranks]
    return sorted(chosen, key=lambda file: (file.rank, file.stream))


_STREAMS = {"stdout.log": STDOUT, "stderr.log": STDERR, "stdout": STDOUT, "stderr": STDERR}


def written_bytes(file: LogFile, log_bytes: int) -> int:
    """Return how many bytes were written to a file, with those that it has left out.

    ``log_bytes`` is the limit of ``--log-max-size``.
    """
    gap = _gap_of(file, log_bytes)
    return _size_of(file) + (0 if gap is None else gap.shift)


def read_lines(
    job: Job,
    attempt: int,
    ranks: Collection[int] | None,
    *,
    since: float | None = None,
    ends: Mapping[str, int] | None = None,
    find: FindFiles | None = None,
) -> Iterator[Line]:
    """Yield the lines of an attempt in the order in which they came, to the second, then by rank.

    ``since`` is in seconds since 1970. ``ends``: the offset at which to stop in each file, by path;
    files that it lacks are left out. ``find`` finds the files; without it, those on this host.
    """
    files = log_files(job, attempt, ranks) if find is None else find(attempt, ranks)
    begun: dict[str, bytes] = {}
    for segment in _split_by_time(job, attempt, files, since=since, ends=ends):
        yield from _lines_of(segment, begun)
    yield from _pop_unfinished_lines(files, begun)


def last_lines(
    job: Job,
    attempt: int,
    ranks: Collection[int] | None,
    count: int,
    *,
    ends: Mapping[str, int] | None = None,
    find: FindFiles | None = None,
) -> list[Line]:
    """Return the last ``count`` lines of an attempt. Only the end of each file is read.

    ``find`` is as for ``read_lines``.
    """
    if count == 0:
        return []
    files = log_files(job, attempt, ranks) if find is None else find(attempt, ranks)
    starts = {file.path: _start_of_last(file, count, _stop_offset(file, ends)) for file in files}
    begun: dict[str, bytes] = {}
    lines: list[Line] = []
    for segment in _split_by_time(job, attempt, files, ends=ends, starts=starts):
        start = max(segment.start, starts[segment.file.path])
        if start < segment.end:
            whole = _Segment(time=segment.time, file=segment.file, start=start, end=segment.end)
            lines.extend(_lines_of(whole, begun))
    lines.extend(_pop_unfinished_lines(files, begun))
    return lines[-count:]


class LogFollower:
    """Reads what is written to the log files of a job from now on."""

    def __init__(
        self,
        job: Job,
        ranks: Collection[int] | None,
        *,
        attempt: int | None = None,
        find: FindFiles | None = None,
    ) -> None:
        """Follow ``attempt`` only, or by default the newest one and those after it.

        ``find`` is as for ``read_lines``.
        """
        self._job = job
        self._find: FindFiles = find or partial(log_files, job)
        self._ranks = ranks
        self._attempt = attempt
        self._oldest = attempt if attempt is not None else max(attempts_of(job), default=0)
        """Attempts before this one are not read."""
        self._begun: dict[str, bytes] = {}
        files = self._find(self._oldest, ranks)
        self.ends = {file.path: _end_of_lines(file) for file in files}
        """Where the next line of each file begins now. An incomplete line will be read whole."""
        self._offsets = {
            file.path: self.ends[file.path] + self._shift_and_gap(file)[0] for file in files
        }
        """The same, as if no file had left out bytes."""

    def lines(self) -> Iterator[Line]:
        """Yield lines as they are written, until the job has ended."""
        has_ended = False
        while not has_ended:
            job = read_job(self._job.path)
            has_ended = job is None or job.state.has_ended
            attempts = self._followed_attempts()
            for attempt in attempts:
                files = self._find(attempt, self._ranks)
                yield from self._new_lines(files)
                if has_ended or attempt != attempts[-1]:
                    yield from _pop_unfinished_lines(files, self._begun)
            if len(attempts) > 1:  # late output of the attempt before the newest may still come
                self._oldest = attempts[-2]
            if not has_ended:
                time.sleep(POLL_S)

    def _new_lines(self, files: Iterable[LogFile]) -> Iterator[Line]:
        for file in files:
            size = _size_of(file)
            shift, gap = self._shift_and_gap(file)
            start = self._offsets.get(file.path, 0)
            if start < size + shift:
                if gap is not None and start > gap.begin:
                    start = max(start - shift, gap.begin)
                    if start < gap.end:  # what was to be read next has been left out
                        start = gap.begin
                segment = _Segment(time=0.0, file=file, start=start, end=size)
                end = start + (yield from _lines_of(segment, self._begun))
                is_last_part = end >= size or gap is None or end >= gap.end
                self._offsets[file.path] = end + (shift if is_last_part else 0)

    def _shift_and_gap(self, file: LogFile) -> tuple[int, log_limit.Gap | None]:
        gap = _gap_of(file, self._job.log_bytes)
        return (0, None) if gap is None else (gap.shift, gap)

    def _followed_attempts(self) -> list[int]:
        if self._attempt is not None:
            return [self._attempt]
        return [attempt for attempt in attempts_of(self._job) if attempt >= self._oldest]


def _pop_unfinished_lines(files: Iterable[LogFile], begun: dict[str, bytes]) -> Iterator[Line]:
    for file in files:
        if rest := begun.pop(file.path, b""):
            yield Line(rank=file.rank, text=rest)


def _stop_offset(file: LogFile, ends: Mapping[str, int] | None) -> int:
    return _size_of(file) if ends is None else ends.get(file.path, 0)


def _split_by_time(
    job: Job,
    attempt: int,
    files: Sequence[LogFile],
    *,
    since: float | None = None,
    ends: Mapping[str, int] | None = None,
    starts: Mapping[str, int] | None = None,
) -> list[_Segment]:
    """Return the parts of the files, in order of time, then of rank. A file without marks, of an
    older version, is one part.

    ``starts`` has the offset by path from which a part is needed.
    """
    marks: dict[str, list[log_times.Mark]] = {}
    without_oldest: set[str] = set()
    """Files whose marks before ``since`` are not known."""
    for source, own_files in _by_source(files):
        by_stream = {(file.rank, file.stream): file.path for file in own_files}
        if source is None:
            found: Iterable[log_times.Mark] = _read_marks(times_path(job.path, attempt))
        else:
            found, is_partial = source.marks(own_files, starts, since)
            without_oldest.update(by_stream.values() if is_partial and since is not None else ())
        for mark in found:
            path = by_stream.get((mark.rank, mark.stream))
            if path is not None:
                known = marks.setdefault(path, [])
                if not known or mark.offset > known[-1].offset:
                    known.append(mark)
    segments: list[_Segment] = []
    for file in files:
        size = _stop_offset(file, ends)
        own = marks.get(file.path, [])
        gap = _gap_of(file, job.log_bytes)
        places = [(mark.offset, mark.time) for mark in own]
        if gap is not None:
            places = _places_with_gap(places, gap)
        bounds = [(offset, when) for offset, when in places if offset < size]
        if file.path in without_oldest:
            if not bounds:
                continue
        elif not bounds or bounds[0][0] > 0:
            bounds.insert(0, (0, bounds[0][1] if bounds else 0.0))
        stops = [*(offset for offset, _ in bounds[1:]), size]
        segments.extend(
            _Segment(time=when, file=file, start=start, end=end)
            for (start, when), end in zip(bounds, stops, strict=True)
            if start < end and (since is None or when + log_times.STEP_S >= since)
        )
    return sorted(
        segments, key=lambda each: (each.time, each.file.rank, each.file.stream, each.start)
    )


def _by_source(
    files: Iterable[LogFile],
) -> Iterator[tuple[LogSource | None, list[LogFile]]]:
    grouped: dict[int, list[LogFile]] = {}
    for file in files:
        grouped.setdefault(id(file.source), []).append(file)
    for group in grouped.values():
        yield group[0].source, group


def _places_with_gap(
    places: Sequence[tuple[int, float]], gap: log_limit.Gap
) -> list[tuple[int, float]]:
    """Return the offsets and times of a file that has left out bytes, from those of all bytes."""
    last = gap.begin + gap.left_out
    before = [each for each in places if each[0] < gap.begin]
    times = [when for offset, when in places if offset <= last]
    after = [(offset - gap.shift, when) for offset, when in places if offset > last]
    return [*before, *([(gap.begin, times[-1])] if times else []), *after]


def _gap_of(file: LogFile, most_bytes: int) -> log_limit.Gap | None:
    """Return where a file has left out bytes; None if it has not."""
    if file.source is not None:
        return file.source.gap(file)
    if not most_bytes:
        return None
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return log_limit.find_gap(descriptor, most_bytes)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _read_marks(path: str) -> Iterator[log_times.Mark]:
    rest = b""
    for block in _read_local_blocks(path, 0, min(_size_of_path(path), _MOST_INDEX_BYTES)):
        data = rest + block
        whole = len(data) - len(data) % log_times.MARK_BYTES
        yield from log_times.unpack_marks(data[:whole])
        rest = data[whole:]


def _lines_of(segment: _Segment, begun: dict[str, bytes]) -> Generator[Line, None, int]:
    """Yield the whole lines of a part, and return how many bytes were read. ``begun`` has, by path,
    the beginning of the next line; it is updated."""
    read = 0
    rest = begun.pop(segment.file.path, b"")
    for block in _read_blocks(segment.file, segment.start, segment.end):
        read += len(block)
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield Line(rank=segment.file.rank, text=line)
        if len(rest) > _LONGEST_LINE:
            yield Line(rank=segment.file.rank, text=rest)
            rest = b""
    if rest:
        begun[segment.file.path] = rest
    return read


def _read_blocks(file: LogFile, start: int, end: int) -> Iterator[bytes]:
    return (
        _read_local_blocks(file.path, start, end)
        if file.source is None
        else file.source.blocks(file, start, end)
    )


def _read_local_blocks(path: str, start: int, end: int) -> Iterator[bytes]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return
        while start < end and (block := os.pread(descriptor, min(_BLOCK, end - start), start)):
            start += len(block)
            yield block
    except OSError:
        return
    finally:
        os.close(descriptor)


def _end_of_lines(file: LogFile) -> int:
    size = _size_of(file)
    start = max(0, size - _LAST_BLOCK)
    block = b"".join(_read_blocks(file, start, size))
    if b"\n" not in block and start:
        start = max(0, size - _BLOCK)
        block = b"".join(_read_blocks(file, start, size))
    return start + block.rfind(b"\n") + 1 if b"\n" in block else start


def _start_of_last(file: LogFile, count: int, size: int) -> int:
    """Return where the last ``count`` lines begin. Longer lines than ``_LONGEST_LINE`` are several."""
    end = size
    found = 0
    step = _LAST_BLOCK
    while end > 0 and size - end < count * _LONGEST_LINE:
        start = max(0, end - step)
        step = min(2 * step, _BLOCK)
        block = b"".join(_read_blocks(file, start, end))
        if not block:
            return end
        at = len(block) - 1 if end == size and block.endswith(b"\n") else len(block)
        while (at := block.rfind(b"\n", 0, at)) >= 0:
            found += 1
            if found == count:
                return start + at + 1
        end = start
    return end


def _size_of(file: LogFile) -> int:
    return _size_of_path(file.path) if file.source is None else file.source.size(file)


def _size_of_path(path: str) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return 0


def _attempt_directory(job: Job, attempt: int) -> str | None:
    for name in _names_in(job.path):
        if _attempt_number(name) == attempt:
            return os.path.join(job.path, name)
    return None


def _attempt_number(name: str) -> int | None:
    for begin in ("attempt-", "attempt_"):
        if name.startswith(begin) and name[len(begin) :].isdecimal():
            return int(name[len(begin) :])
    return None


def _names_in(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
