"""Read the log files of a job's ranks."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from distlaunch.core.model import log_limit, log_times
from distlaunch.core.model.record import Record
from distlaunch.core.model.run_files import STDERR, STDOUT, times_path
from distlaunch.jobs.events import POLL_S
from distlaunch.jobs.job import Job, read_job

_BLOCK = 1 << 18
_LONGEST_LINE = 1 << 20
"""A longer line is shown in parts."""
_MOST_INDEX_BYTES = 1 << 30


class LogFile(Record):
    """A file with output of one rank."""

    path: str
    rank: int
    stream: int
    """STDOUT or STDERR; 0 for a file with both."""


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


def read_lines(
    job: Job,
    attempt: int,
    ranks: Collection[int] | None,
    *,
    since: float | None = None,
    ends: Mapping[str, int] | None = None,
) -> Iterator[Line]:
    """Yield the lines of an attempt in the order in which they came, to the second, then by rank.

    ``since`` is in seconds since 1970. ``ends``: the offset at which to stop in each file, by path;
    files that it lacks are left out.
    """
    files = log_files(job, attempt, ranks)
    begun: dict[str, bytes] = {}
    for segment in _split_by_time(job, attempt, files, since, ends):
        yield from _lines_of(segment, begun)
    yield from _pop_unfinished_lines(files, begun)


def last_lines(
    job: Job,
    attempt: int,
    ranks: Collection[int] | None,
    count: int,
    *,
    ends: Mapping[str, int] | None = None,
) -> list[Line]:
    """Return the last ``count`` lines of an attempt. Only the end of each file is read."""
    if count == 0:
        return []
    files = log_files(job, attempt, ranks)
    starts = {
        file.path: _start_of_last(file.path, count, _stop_offset(file, ends)) for file in files
    }
    begun: dict[str, bytes] = {}
    lines: list[Line] = []
    for segment in _split_by_time(job, attempt, files, None, ends):
        start = max(segment.start, starts[segment.file.path])
        if start < segment.end:
            whole = _Segment(time=segment.time, file=segment.file, start=start, end=segment.end)
            lines.extend(_lines_of(whole, begun))
    lines.extend(_pop_unfinished_lines(files, begun))
    return lines[-count:]


class LogFollower:
    """Reads what is written to the log files of a job from now on."""

    def __init__(
        self, job: Job, ranks: Collection[int] | None, *, attempt: int | None = None
    ) -> None:
        """Follow ``attempt`` only, or by default the newest one and those after it."""
        self._job = job
        self._ranks = ranks
        self._attempt = attempt
        self._oldest = attempt if attempt is not None else max(attempts_of(job), default=0)
        """Attempts before this one are not read."""
        self._begun: dict[str, bytes] = {}
        files = log_files(job, self._oldest, ranks)
        self.ends = {file.path: _end_of_lines(file.path) for file in files}
        """Where the next line of each file begins now. An incomplete line will be read whole."""
        self._offsets = {
            path: end + self._shift_and_gap(path)[0] for path, end in self.ends.items()
        }
        """The same, as if no file had left out bytes."""

    def lines(self) -> Iterator[Line]:
        """Yield lines as they are written, until the job has ended."""
        has_ended = False
        while not has_ended:
            job = read_job(self._job.path)
            has_ended = job is None or job.state.has_ended
            attempts = self._attempts()
            for attempt in attempts:
                files = log_files(self._job, attempt, self._ranks)
                yield from self._new_lines(files)
                if has_ended or attempt != attempts[-1]:
                    yield from _pop_unfinished_lines(files, self._begun)
            if len(attempts) > 1:  # late output of the attempt before the newest may still come
                self._oldest = attempts[-2]
            if not has_ended:
                time.sleep(POLL_S)

    def _new_lines(self, files: Iterable[LogFile]) -> Iterator[Line]:
        for file in files:
            size = _size_of(file.path)
            shift, gap = self._shift_and_gap(file.path)
            start = self._offsets.get(file.path, 0)
            if start < size + shift:
                self._offsets[file.path] = size + shift
                if gap is not None and start > gap.begin:
                    start = max(start - shift, gap.begin)
                    if start < gap.end:  # what was to be read next has been left out
                        start = gap.begin
                segment = _Segment(time=0.0, file=file, start=start, end=size)
                yield from _lines_of(segment, self._begun)

    def _shift_and_gap(self, path: str) -> tuple[int, log_limit.Gap | None]:
        gap = _gap_of(path, self._job.log_bytes)
        return (0, None) if gap is None else (gap.shift, gap)

    def _attempts(self) -> list[int]:
        if self._attempt is not None:
            return [self._attempt]
        return [attempt for attempt in attempts_of(self._job) if attempt >= self._oldest]


def _pop_unfinished_lines(files: Iterable[LogFile], begun: dict[str, bytes]) -> Iterator[Line]:
    for file in files:
        if rest := begun.pop(file.path, b""):
            yield Line(rank=file.rank, text=rest)


def _stop_offset(file: LogFile, ends: Mapping[str, int] | None) -> int:
    return _size_of(file.path) if ends is None else ends.get(file.path, 0)


def _split_by_time(
    job: Job,
    attempt: int,
    files: Sequence[LogFile],
    since: float | None,
    ends: Mapping[str, int] | None,
) -> list[_Segment]:
    """Return the parts of the files, in order of time, then of rank. A file without marks, of an
    older version, is one part."""
    marks: dict[tuple[int, int], list[log_times.Mark]] = {}
    wanted = {(file.rank, file.stream) for file in files}
    for mark in _read_marks(times_path(job.path, attempt)):
        if (mark.rank, mark.stream) in wanted:
            known = marks.setdefault((mark.rank, mark.stream), [])
            if not known or mark.offset > known[-1].offset:
                known.append(mark)
    segments: list[_Segment] = []
    for file in files:
        size = _stop_offset(file, ends)
        own = sorted(marks.get((file.rank, file.stream), ()), key=lambda mark: mark.offset)
        gap = _gap_of(file.path, job.log_bytes)
        places = [(mark.offset, mark.time) for mark in own]
        if gap is not None:
            places = _places_with_gap(places, gap)
        bounds = [(offset, when) for offset, when in places if offset < size]
        if not bounds or bounds[0][0] > 0:
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


def _places_with_gap(
    places: Sequence[tuple[int, float]], gap: log_limit.Gap
) -> list[tuple[int, float]]:
    """Return the offsets and times of a file that has left out bytes, from those of all bytes."""
    last = gap.begin + gap.left_out
    before = [each for each in places if each[0] < gap.begin]
    times = [when for offset, when in places if offset <= last]
    after = [(offset - gap.shift, when) for offset, when in places if offset > last]
    return [*before, *([(gap.begin, times[-1])] if times else []), *after]


def _gap_of(path: str, most_bytes: int) -> log_limit.Gap | None:
    """Return where a file has left out bytes; None if it has not."""
    if not most_bytes:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
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
    for block in _read_blocks(path, 0, min(_size_of(path), _MOST_INDEX_BYTES)):
        data = rest + block
        whole = len(data) - len(data) % log_times.MARK_BYTES
        yield from log_times.unpack_marks(data[:whole])
        rest = data[whole:]


def _lines_of(segment: _Segment, begun: dict[str, bytes]) -> Iterator[Line]:
    """Yield the whole lines of a part. ``begun`` has, by path, the beginning of the next line; it
    is updated."""
    rest = begun.pop(segment.file.path, b"")
    for block in _read_blocks(segment.file.path, segment.start, segment.end):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield Line(rank=segment.file.rank, text=line)
        if len(rest) > _LONGEST_LINE:
            yield Line(rank=segment.file.rank, text=rest)
            rest = b""
    if rest:
        begun[segment.file.path] = rest


def _read_blocks(path: str, start: int, end: int) -> Iterator[bytes]:
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


def _end_of_lines(path: str) -> int:
    size = _size_of(path)
    start = max(0, size - _BLOCK)
    block = b"".join(_read_blocks(path, start, size))
    return start + block.rfind(b"\n") + 1 if b"\n" in block else start


def _start_of_last(path: str, count: int, size: int) -> int:
    end = size
    found = 0
    while end > 0:
        start = max(0, end - _BLOCK)
        block = b"".join(_read_blocks(path, start, end))
        if not block:
            return end
        at = len(block) - 1 if end == size and block.endswith(b"\n") else len(block)
        while (at := block.rfind(b"\n", 0, at)) >= 0:
            found += 1
            if found == count:
                return start + at + 1
        end = start
    return 0


def _size_of(path: str) -> int:
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
