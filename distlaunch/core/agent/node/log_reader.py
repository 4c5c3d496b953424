"""Read parts of the ranks' log files on this node, for a user in another shell.

Only the asked part of a file is read, in a thread, because a file server may hang. The coordinator
waits for each answer before it asks again.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

from distlaunch.core.model.log_limit import find_gap
from distlaunch.core.model.run_files import STDERR, STDOUT, Layout, times_path
from distlaunch.core.protocol import agent_messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator

Logs = tuple[str, Layout]
"""Directory and layout."""
_HANGS = "the file system of the logs does not answer"
_NO_LOGS = "it has no logs of the job"


class LogReader:
    """Answers one request at a time. ``post`` is called with the answer, mostly in a thread."""

    def __init__(self, post: Callable[[m.LogList | m.LogPart], None]) -> None:
        self._post = post
        self._thread: threading.Thread | None = None

    def read(self, request: m.ListLogs | m.ReadLog, logs: Logs | None) -> None:
        """Begin to answer a request. The answer is a refusal if ``logs`` is None, since the node
        has none, or if the file system still keeps an earlier request waiting."""
        if logs is None:
            self._post(_refusal(request, _NO_LOGS))
            return
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout=0.05)  # it may have posted its answer, and be about to end
            if self._thread.is_alive():
                self._post(_refusal(request, _HANGS))
                return
        known = logs

        def work() -> None:
            self._post(answer(request, known))

        self._thread = threading.Thread(target=work, name="logs", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._post(_refusal(request, "no thread can be started"))


def answer(request: m.ListLogs | m.ReadLog, logs: Logs) -> m.LogList | m.LogPart:
    """Return the answer to a request. Its ``problem`` says why files cannot be read."""
    directory, layout = logs
    try:
        if isinstance(request, m.ListLogs):
            return _list(request, directory, layout)
        return _part(request, directory, layout)
    except OSError as exc:
        return _refusal(request, exc.strerror or str(exc))
    except (ValueError, OverflowError) as exc:  # numbers that no file has
        return _refusal(request, str(exc))


def _refusal(request: m.ListLogs | m.ReadLog, problem: str) -> m.LogList | m.LogPart:
    if isinstance(request, m.ListLogs):
        return m.LogList(serial=request.serial, files=(), index_bytes=0, problem=problem)
    return m.LogPart(serial=request.serial, data=b"", problem=problem)


def _list(request: m.ListLogs, directory: str, layout: Layout) -> m.LogList:
    os.listdir(directory)  # raises OSError if it is not there
    files = []
    for rank in request.ranks:
        for stream in (STDOUT, STDERR) if layout.separate else (0,):
            try:
                with _opened(_path(directory, layout, request.attempt, rank, stream)) as descriptor:
                    size = os.fstat(descriptor).st_size
                    gap = find_gap(descriptor, layout.log_bytes) if layout.log_bytes else None
            except OSError:  # the rank has written nothing yet
                continue
            files.append(
                m.LogInfo(
                    rank=rank,
                    stream=stream,
                    size=size,
                    gap_begin=-1 if gap is None else gap.begin,
                    left_out=0 if gap is None else gap.left_out,
                )
            )
    try:
        index_bytes = os.stat(times_path(directory, request.attempt)).st_size
    except OSError:
        index_bytes = 0
    return m.LogList(serial=request.serial, files=tuple(files), index_bytes=index_bytes)


def _part(request: m.ReadLog, directory: str, layout: Layout) -> m.LogPart:
    path = (
        times_path(directory, request.attempt)
        if request.rank is None
        else _path(directory, layout, request.attempt, request.rank, request.stream)
    )
    size = max(0, min(request.size, m.LOG_PART_BYTES))
    with _opened(path) as descriptor:
        return m.LogPart(
            serial=request.serial, data=os.pread(descriptor, size, max(0, request.offset))
        )


def _path(directory: str, layout: Layout, attempt: int, rank: int, stream: int) -> str:
    return layout.log_path(directory, attempt, rank, stream or STDERR)


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """Open a regular file for reading. Raises OSError."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is no plain file")
        yield descriptor
    finally:
        os.close(descriptor)
