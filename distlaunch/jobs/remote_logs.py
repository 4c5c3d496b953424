"""Log files on other nodes of a running job, read through its launcher.

Only what is shown is read: the end of a file for its last lines, the end of the index of times for
lines since a time. The launcher checks what a node sends: only ranks that ran there may be in it.
"""

from __future__ import annotations

import time
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from distlaunch.core.errors import ConfigError
from distlaunch.core.model import log_limit, log_times
from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.text import printable
from distlaunch.core.protocol.agent_messages import LOG_PART_BYTES
from distlaunch.jobs.ask_running import ask_running, refuse_odd_answers
from distlaunch.jobs.job import Job
from distlaunch.jobs.other_logs import OtherLogs, other_logs
from distlaunch.jobs.worker_logs import LogFile, log_files, written_bytes

_ANSWER_S = 15.0
"""How long the launcher may take. It waits some seconds for nodes that do not answer, and others
may read logs, too."""
_RETRY_S = 10.0
"""When files are listed again that could not be listed."""
_LIST_S = 1.0
"""How long a list of the nodes' files is used."""
_FIRST_INDEX_BYTES = 1000 * log_times.MARK_BYTES
"""Read first at the end of an index of times."""
_MOST_CACHED = 64 << 20


class UnreadLogs(Record):
    """Logs that could not be read from their node."""

    logs: OtherLogs
    why: str
    """As a clause; may be empty."""


class _Node(Record):
    attempt: int
    node: int
    host: str
    rank: int
    """One of its ranks."""
    index_bytes: int


class _Remote(Record):
    """A file on a node."""

    node: _Node
    size: int
    gap: log_limit.Gap | None


class _Found(Record):
    at: float
    files: tuple[LogFile, ...]
    lost_ranks: frozenset[int]
    """Ranks of lost nodes, of which a part of the output is here."""


class RemoteLogs:
    """Finds and reads the log files of one job, on this host and on others.

    Files on other hosts have this object as their ``source``.
    """

    def __init__(self, job: Job, on_unread: Callable[[UnreadLogs], None]) -> None:
        """Call ``on_unread`` once for logs that cannot be read, and again if the reason changes."""
        self._job = job
        self._on_unread = on_unread
        self._reported: set[UnreadLogs] = set()
        self._retry_at: dict[tuple[int, int], float] = {}
        """By attempt and rank: when to ask again for files that could not be listed."""
        self._remote: dict[str, _Remote] = {}
        """By the path of the ``LogFile``."""
        self._found: dict[tuple[int, frozenset[int] | None], _Found] = {}
        """By attempt and ranks: the files on other nodes."""
        self._cache: OrderedDict[str, tuple[int, bytes]] = OrderedDict()
        """By path: the offset and the bytes of the last part that was read."""
        self._cached_bytes = 0
        self._broken: dict[str, str] = {}
        """By host: why its files cannot be read any further."""

    # --- finding

    def find(self, attempt: int, ranks: Collection[int] | None) -> list[LogFile]:
        """Return the log files of an attempt, on any host, ordered by rank and stream."""
        local = log_files(self._job, attempt, ranks)
        asked = (attempt, None if ranks is None else frozenset(ranks))
        found = self._found.get(asked)
        if found is None or time.monotonic() >= found.at + _LIST_S:
            found = self._found[asked] = self._find_remote(attempt, ranks)
        theirs: dict[int, list[LogFile]] = {}
        for file in found.files:
            theirs.setdefault(file.rank, []).append(file)
        ours = {rank: list(files) for rank, files in groupby(local, key=lambda file: file.rank)}
        more = {
            rank: files
            for rank, files in theirs.items()
            if rank not in found.lost_ranks or self._is_more(files, ours.get(rank, ()))
        }
        chosen = {**ours, **more}
        return [file for rank in sorted(chosen) for file in chosen[rank]]

    def _is_more(self, files: Iterable[LogFile], others: Iterable[LogFile]) -> bool:
        """Return whether the first files have more output than the others."""
        limit = self._job.log_bytes
        theirs = sum(written_bytes(file, limit) for file in files)
        return theirs > sum(written_bytes(file, limit) for file in others)

    def _find_remote(self, attempt: int, ranks: Collection[int] | None) -> _Found:
        others = other_logs(self._job, attempt, ranks)
        now = time.monotonic()
        wanted = sorted(
            rank
            for rank in {rank for each in others for rank in each.ranks}
            if now >= self._retry_at.get((attempt, rank), now)
        )
        lost = frozenset(rank for each in others if each.is_lost for rank in each.ranks)
        files: list[LogFile] = []
        if wanted:
            try:
                with refuse_odd_answers(self._job):
                    answers = self._ask_launcher("logs", attempt=attempt, ranks=_ranges(wanted))
                    for answer in answers:
                        files += self._files_of(answer, attempt)
                    problems = _problems(answers)
            except ConfigError as exc:
                problems = dict.fromkeys(wanted, exc.message)
            for rank, problem in problems.items():
                if problem is not None:
                    self._retry_at[attempt, rank] = now + _RETRY_S
            asked = frozenset(wanted) - {file.rank for file in files}
            for unread in _unread_of(others, problems, asked):
                self._report_once(unread)
        files.sort(key=lambda file: (file.rank, file.stream))
        return _Found(at=time.monotonic(), files=tuple(files), lost_ranks=lost)

    def _report_once(self, unread: UnreadLogs) -> None:
        if unread not in self._reported:
            self._reported.add(unread)
            self._on_unread(unread)

    def _ask_launcher(self, kind: str, **fields: object) -> Any:
        return ask_running(self._job, "logs", kind, timeout_s=_ANSWER_S, **fields)

    def _files_of(self, answer: Mapping[str, Any], attempt: int) -> list[LogFile]:
        host = str(answer["host"])
        files = []
        for each in answer["files"]:
            rank, stream = int(each["rank"]), int(each["stream"])
            node = _Node(
                attempt=attempt,
                node=int(answer["node"]),
                host=host,
                rank=rank,
                index_bytes=int(answer["index_bytes"]),
            )
            begin, left_out = int(each["gap_begin"]), int(each["left_out"])
            gap = None if begin < 0 else log_limit.Gap(begin=begin, left_out=left_out)
            path = f"{node.node}/{attempt}/{rank}/{stream}"
            before = self._remote.get(path)
            if before is not None and before.gap != gap:
                self._forget_block(path)  # bytes were moved within the file
            self._remote[path] = _Remote(node=node, size=int(each["size"]), gap=gap)
            files.append(LogFile(path=path, rank=rank, stream=stream, source=self))
        self._broken.pop(host, None)
        return files

    # --- reading

    def size(self, file: LogFile) -> int:
        """Return the size that the file had when it was found."""
        return self._remote[file.path].size

    def gap(self, file: LogFile) -> log_limit.Gap | None:
        """Return where the file has left out bytes; None if it has not."""
        return self._remote[file.path].gap

    def blocks(self, file: LogFile, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of a part of a file, until its node does not answer."""
        while start < end and (block := self._cached_block(file, start, end)):
            yield block
            start += len(block)

    def _cached_block(self, file: LogFile, start: int, end: int) -> bytes:
        at, data = self._cache.get(file.path, (0, b""))
        if not at <= start < at + len(data):
            self._forget_block(file.path)
            remote = self._remote[file.path]
            most = min(remote.size - start, LOG_PART_BYTES)
            at, data = start, self._fetch_part(remote.node, file.rank, file.stream, start, most)
            self._cache[file.path] = at, data
            self._cached_bytes += len(data)
            while self._cached_bytes > _MOST_CACHED:
                self._forget_block(next(iter(self._cache)))
        else:
            self._cache.move_to_end(file.path)
        return data[start - at : end - at]

    def _forget_block(self, path: str) -> None:
        _, data = self._cache.pop(path, (0, b""))
        self._cached_bytes -= len(data)

    def _fetch_part(
        self, node: _Node, rank: int, stream: int | None, start: int, size: int
    ) -> bytes:
        if size <= 0 or node.host in self._broken:
            return b""
        try:
            with refuse_odd_answers(self._job):
                answer = self._ask_launcher(
                    "log_part",
                    attempt=node.attempt,
                    rank=rank,
                    stream=stream,
                    offset=start,
                    size=size,
                )
                return b64decode(answer["data"], validate=True)[:size]
        except ConfigError as exc:
            self._broken[node.host] = exc.message
            logs = OtherLogs(host=node.host, ranks=(node.rank,), directory="", is_lost=False)
            self._report_once(UnreadLogs(logs=logs, why=exc.message))
            return b""

    def marks(
        self, files: Sequence[LogFile], starts: Mapping[str, int] | None, since: float | None
    ) -> tuple[list[log_times.Mark], bool]:
        """Return the marks in the indexes of these files' nodes, and whether earlier marks are
        missing.

        An index is read from its end: back to ``since``, or until each file has a mark at or before
        its offset in ``starts``.
        """
        marks: list[log_times.Mark] = []
        is_partial = False
        by_node: dict[tuple[int, int], list[LogFile]] = {}
        for file in files:
            node = self._remote[file.path].node
            by_node.setdefault((node.attempt, node.node), []).append(file)
        for own in by_node.values():
            needed = None
            if starts is not None:
                needed = {
                    (file.rank, file.stream): self._place(file, starts.get(file.path, 0))
                    for file in own
                }
            known, is_whole = self._marks_of(self._remote[own[0].path].node, needed, since)
            marks += known
            is_partial = is_partial or not is_whole
        return marks, is_partial

    def _place(self, file: LogFile, offset: int) -> int:
        """Return the place of a byte among all that the rank has written."""
        gap = self._remote[file.path].gap
        return offset if gap is None or offset < gap.begin else offset + gap.shift

    def _marks_of(
        self, node: _Node, needed: dict[tuple[int, int], int] | None, since: float | None
    ) -> tuple[list[log_times.Mark], bool]:
        """Return a node's marks in order of time, and whether none is missing.

        ``needed``: by rank and stream, a place. Once each has a mark at or before its place, no
        earlier marks are read.
        """
        blocks: list[list[log_times.Mark]] = []
        end = node.index_bytes - node.index_bytes % log_times.MARK_BYTES
        step = _FIRST_INDEX_BYTES
        while end > 0:
            start = max(0, end - step)
            step = min(2 * step, LOG_PART_BYTES)
            data = self._fetch_part(node, node.rank, None, start, end - start)
            if len(data) != end - start:
                break
            end = start
            block = list(log_times.unpack_marks(data))
            blocks.append(block)
            if since is not None and block[0].time < since - log_times.STEP_S:
                break
            if needed is not None:
                for mark in block:
                    if mark.offset <= needed.get((mark.rank, mark.stream), -1):
                        del needed[mark.rank, mark.stream]
                if not needed:
                    break
        return [mark for block in reversed(blocks) for mark in block], end == 0


def unread_line(unread: UnreadLogs, line: str) -> str:
    """Return the sentence for logs that could not be read. ``line`` says where they are."""
    return f"{line} ({printable(unread.why)})" if unread.why else line


def _ranges(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last rank of each range of sorted ranks."""
    ranges: list[tuple[int, int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    return ranges


def _problems(answers: Iterable[Mapping[str, Any]]) -> dict[int, str | None]:
    """Return by rank why its node has not listed its files; None if it has."""
    return {
        int(rank): None if answer["problem"] is None else str(answer["problem"])
        for answer in answers
        for rank in answer["ranks"]
    }


def _unread_of(
    others: Iterable[OtherLogs], problems: Mapping[int, str | None], asked: Collection[int]
) -> Iterator[UnreadLogs]:
    for each in others:
        by_reason: dict[str, list[int]] = {}
        for rank in each.ranks:
            if rank in asked and (why := problems.get(rank, "")) is not None:
                by_reason.setdefault(why, []).append(rank)
        for why, ranks in by_reason.items():
            yield UnreadLogs(logs=replace(each, ranks=tuple(ranks)), why=why)
