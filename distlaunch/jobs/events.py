"""Read and follow the event file of a job."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from distlaunch.jobs.job import Job, parse_events, read_job

POLL_S = 0.2
_BLOCK = 1 << 20
_PROGRESS = b'"type": "progress"'
_HEAD_BYTES = 64
"""The type stands within the first bytes of an event."""


def read_events(path: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a file in order; none if it cannot be opened."""
    yield from _parse_each(_Tail(path).lines())


def _parse_each(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the events in these lines as they come; see ``parse_events``."""
    for line in lines:
        yield from parse_events([line])


def read_events_but_old_progress(path: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a file in order, and of ``progress`` events in a row only the last.

    In the file of a job that runs for days nearly all events are of this type.
    """
    newest = b""
    for line in _Tail(path).lines():
        if _PROGRESS in line[:_HEAD_BYTES]:
            newest = line
            continue
        yield from parse_events([newest, line] if newest else [line])
        newest = b""
    yield from parse_events([newest])


def is_stop_signal(event: Mapping[str, Any]) -> bool:
    """Return whether the launcher has got a signal that ends the job. SIGUSR1 and SIGUSR2 do not."""
    return event.get("type") == "signal" and event.get("signal") not in ("SIGUSR1", "SIGUSR2")


def select_events(
    job: Job,
    *,
    kinds: frozenset[str] | None = None,
    since: float | None = None,
    tail: int | None = None,
    follow: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield events of a job in order.

    ``kinds``: their types; None is all. ``since``: the earliest time, in seconds since 1970.
    ``tail``: only the last ones of those that have been written. With ``follow`` also those to
    come until the job has ended.
    """
    lines = _Tail(job.events)
    while True:
        now = read_job(job.path) if follow else None
        has_ended = now is None or now.state.has_ended
        written = _select_matching(_parse_each(lines.lines()), kinds, since)
        yield from written if tail is None else deque(written, maxlen=tail)
        if has_ended:
            return
        tail = None
        time.sleep(POLL_S)


def _select_matching(
    events: Iterable[dict[str, Any]], kinds: frozenset[str] | None, since: float | None
) -> Iterator[dict[str, Any]]:
    for event in events:
        when = event.get("time")
        is_recent = since is None or (isinstance(when, (int, float)) and when >= since)
        if is_recent and (kinds is None or event["type"] in kinds):
            yield event


class _Tail:
    def __init__(self, path: str) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that were written since the last call."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(self._path, flags)
        except OSError:
            return
        begun = b""
        try:
            while block := os.pread(descriptor, _BLOCK, self._offset + len(begun)):
                *lines, begun = (begun + block).split(b"\n")
                for line in lines:
                    self._offset += len(line) + 1
                    yield line
        except OSError:
            return
        finally:
            os.close(descriptor)
