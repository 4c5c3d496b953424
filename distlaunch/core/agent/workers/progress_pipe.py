"""Signs of life of a node's workers: their progress pipes, and whose output has moved.

A sample, never a parser of all that is written: when the first pipe can be read the others get a
moment to follow, then each is read once and its last good line counts. That is at most one round
and one message a second, whatever workers write; where none reports, nothing ever wakes up. Called
by the output pump's thread only. ``docs/progress.md`` defines the lines.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable, Sequence
from contextlib import suppress

from distlaunch.core.protocol import agent_messages as m

GATHER_S = 0.2
"""How long after the first sign the others may follow, to be told in the same message."""
PERIOD_S = 1.0
"""The least time between two messages of an attempt."""
LINE_BYTES = 4096
NAME_CHARS = 64
NAMES = 16
_READ_BYTES = 64 << 10
_LINES_TRIED = 8
_BRACKETS = 64
_EXACT = 1 << 53
"""Whole numbers beyond it are told as floats."""


def last_heartbeat(lines: Sequence[bytes]) -> dict[str, float] | None:
    """Read the last of these lines that is a heartbeat: a JSON object, of which finite numbers are
    kept."""
    for line in reversed(lines[-_LINES_TRIED:]):
        if len(line) > LINE_BYTES or line.count(b"[") + line.count(b"{") > _BRACKETS:
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
            continue
        if isinstance(record, dict):
            return _numbers(record)
    return None


def _numbers(record: dict[str, object]) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, value in record.items():
        if len(values) == NAMES:
            break
        if (
            type(value) not in (int, float)
            or not 0 < len(name) <= NAME_CHARS
            or not name.isprintable()
        ):
            continue
        with suppress(OverflowError):  # an integer of hundreds of digits
            number = value if type(value) is int and -_EXACT <= value <= _EXACT else float(value)  # type: ignore[arg-type]
            if number - number == 0:  # neither NaN nor infinite
                values[name] = number
    return values


class _Pipe:
    """The reading end of one worker's progress pipe."""

    def __init__(self, rank: int, descriptor: int) -> None:
        self.rank = rank
        self.descriptor = descriptor
        self._rest = b""
        self._overlong = False
        """The line that is under way is over the limit; what comes up to its end is dropped."""

    def read(self) -> tuple[bool, dict[str, float] | None]:
        """Read once, without waiting; tell whether the pipe goes on, and the last heartbeat that
        came."""
        try:
            data = os.read(self.descriptor, _READ_BYTES)
        except BlockingIOError:
            return True, None
        if not data:
            return False, last_heartbeat(
                [self._rest]
            ) if self._rest and not self._overlong else None
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = self._rest + lines[0]
            if self._overlong:
                del lines[0]
            self._rest, self._overlong = rest, False
        else:
            self._rest += rest
        if len(self._rest) > LINE_BYTES:
            self._rest, self._overlong = b"", True
        return True, last_heartbeat(lines) if lines else None


class ActivityMonitor:
    """Gathers them for one node; ``post`` gets an ``Alive`` at ``due``, if there is something to
    tell.

    ``pollers`` are whatever polls ``fileno()`` and calls ``tick`` when it can be read.
    """

    def __init__(self, pollers: Sequence[select.epoll], post: Callable[[m.Alive], None]) -> None:
        self._pollers = pollers
        self._post = post
        self._attempt = 0
        self.watching = False
        self.wrote: set[int] = set()
        """Ranks that wrote output since the last message; filled by the pump, only while
        ``watching``."""
        self.due: float | None = None
        self._sampled = float("-inf")
        self._output_period_s = PERIOD_S
        self._heartbeats: dict[int, dict[str, float]] = {}
        self._pipes: dict[int, _Pipe] = {}  # by descriptor
        self._of_rank: dict[int, _Pipe] = {}
        self._poll = select.epoll()
        for poller in pollers:
            poller.register(self._poll, select.EPOLLIN)
        self._listening = True

    def fileno(self) -> int:
        """Return the descriptor that is readable when some worker has reported."""
        return self._poll.fileno()

    def begin(self, attempt: int, *, watching: bool, output_period_s: float = PERIOD_S) -> None:
        """Know which attempt the next workers are of, and whether the coordinator wants to hear
        whose output moves.

        ``output_period_s``: the least time between two messages, if the second has no more to tell
        than output.
        """
        self._attempt, self.watching, self._output_period_s = attempt, watching, output_period_s
        self._sampled = float("-inf")

    def add(self, rank: int, descriptor: int) -> None:
        """Take a worker's pipe, to read and to close."""
        pipe = _Pipe(rank, descriptor)
        self._pipes[descriptor] = self._of_rank[rank] = pipe
        self._poll.register(descriptor, select.EPOLLIN)

    def tick(self, now: float, *, readable: bool, held: bool) -> None:
        """Do what has come due. ``readable``: our descriptor was; ``held``: output waits for
        whoever takes ours."""
        if self.due is not None and now >= self.due:
            self.due = None
            self._sampled = now
            for descriptor, _ in self._poll.poll(0, max(1, len(self._pipes))):
                self._sample(self._pipes[descriptor])
            self._tell(held=held and self.watching)
            self._listen(wanted=True)
        if self._listening and (readable or self._heartbeats):
            self._tell_at(max(now + GATHER_S, self._sampled + PERIOD_S))
            self._listen(wanted=False)
        elif self.due is None and (self.wrote or (held and self.watching)):
            self._tell_at(max(now + GATHER_S, self._sampled + self._output_period_s))

    def _tell_at(self, due: float) -> None:
        self.due = due if self.due is None else min(self.due, due)

    def drain(self, rank: int) -> None:
        """Take what an ended worker has reported last; it is told with the next message."""
        pipe = self._of_rank.get(rank)
        if pipe is not None:
            self._sample(pipe)

    def finish(self) -> None:
        """Take and tell what is left of an attempt, and close its pipes."""
        for pipe in list(self._pipes.values()):
            self._sample(pipe)
        self._tell(held=False)
        self.due = None
        self._listen(wanted=True)
        self._close_pipes()

    def close(self) -> None:
        """Close everything."""
        self._close_pipes()
        self._poll.close()

    def _listen(self, *, wanted: bool) -> None:
        if wanted is not self._listening:
            self._listening = wanted
            for poller in self._pollers:
                poller.modify(self._poll, select.EPOLLIN if wanted else 0)

    def _sample(self, pipe: _Pipe) -> None:
        goes_on, values = pipe.read()
        if values is not None:
            self._heartbeats[pipe.rank] = values
        if not goes_on:
            self._close(pipe)

    def _tell(self, *, held: bool) -> None:
        if not (self._heartbeats or self.wrote or held):
            return
        heartbeats = tuple(
            m.Heartbeat(rank=rank, values=values) for rank, values in self._heartbeats.items()
        )
        wrote = tuple(sorted(self.wrote))
        self._heartbeats = {}
        self.wrote.clear()
        self._post(m.Alive(attempt=self._attempt, heartbeats=heartbeats, wrote=wrote, held=held))

    def _close_pipes(self) -> None:
        for pipe in list(self._pipes.values()):
            self._close(pipe)

    def _close(self, pipe: _Pipe) -> None:
        del self._pipes[pipe.descriptor], self._of_rank[pipe.rank]
        self._poll.unregister(pipe.descriptor)
        os.close(pipe.descriptor)
