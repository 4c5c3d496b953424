"""Collect signs of activity of a node's workers: reported progress, and which ranks write output.

Each worker has a pipe for its progress. ``docs/progress.md`` defines the lines. When the first pipe
is readable, the monitor waits a moment for the others. Then it reads each pipe once and uses the
last valid heartbeat, and all lines that report a checkpoint. So it sends at most one message per
second, and no process wakes up if no worker reports. Only the output pump's thread calls the
monitor.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable, Sequence
from contextlib import suppress

from distlaunch.core.protocol import agent_messages as m

GATHER_S = 0.2
"""How long to wait for the reports of other workers after the first."""
PERIOD_S = 1.0
"""Shortest time between two messages of an attempt."""
LINE_BYTES = 4096
NAME_CHARS = 64
NAMES = 16
_READ_BYTES = 64 << 10
_LINES_TRIED = 8
_CHECKPOINT = b'"checkpoint"'
_MOST_CHECKPOINTS = 16
"""Largest number of checkpoints of a worker in one message. The newest stay."""
_BRACKETS = 64
_EXACT = 1 << 53
"""Larger integers are reported as floats."""
_LARGEST_INT = (1 << 63) - 1
"""Messages hold no larger integers."""


def last_heartbeat(lines: Sequence[bytes]) -> dict[str, float] | None:
    """Return the finite numbers in the last of these lines that is a JSON object; None if no line
    is."""
    for line in reversed(lines[-_LINES_TRIED:]):
        if len(line) > LINE_BYTES or line.count(b"[") + line.count(b"{") > _BRACKETS:
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
            continue
        if isinstance(record, dict):
            return _finite_numbers(record)
    return None


def saved_checkpoint(rank: int, line: bytes) -> m.SavedCheckpoint | None:
    """Return the checkpoint that a line reports, if any."""
    if len(line) > LINE_BYTES or line.count(b"[") + line.count(b"{") > _BRACKETS:
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    saved = record.get("checkpoint") if isinstance(record, dict) else None
    if not isinstance(saved, dict):
        return None
    values = _finite_numbers(saved)
    found = [values.get(name, -1) for name in ("step", "seconds", "bytes")]
    if min(found) < 0:
        return None
    step, seconds, size = found
    if max(int(step), int(size)) > _LARGEST_INT:
        return None
    return m.SavedCheckpoint(rank=rank, step=int(step), seconds=float(seconds), bytes=int(size))


def _finite_numbers(record: dict[str, object]) -> dict[str, float]:
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
            if number - number == 0:  # neither NaN nor infinity
                values[name] = number
    return values


class _Pipe:
    def __init__(self, rank: int, descriptor: int) -> None:
        self.rank = rank
        self.descriptor = descriptor
        self._rest = b""
        self._overlong = False
        """Whether the current line exceeds the limit. Its rest is dropped."""
        self.checkpoints: list[m.SavedCheckpoint] = []
        """Those that were read and have not been reported."""

    def read(self) -> tuple[bool, dict[str, float] | None]:
        """Read once without blocking. Return whether the pipe is still open, and the last
        heartbeat."""
        try:
            data = os.read(self.descriptor, _READ_BYTES)
        except BlockingIOError:
            return True, None
        if not data:
            last = [self._rest] if self._rest and not self._overlong else []
            return False, self._heartbeat_of(last)
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
        return True, self._heartbeat_of(lines)

    def _heartbeat_of(self, lines: list[bytes]) -> dict[str, float] | None:
        """Keep the checkpoints in these lines. Return the last heartbeat in the others, if any."""
        marked = [line for line in lines if _CHECKPOINT in line][-_MOST_CHECKPOINTS:]
        for line in marked:
            if (saved := saved_checkpoint(self.rank, line)) is not None:
                self.checkpoints = [*self.checkpoints, saved][-_MOST_CHECKPOINTS:]
                lines = [each for each in lines if each is not line]
        return last_heartbeat(lines)


class ActivityMonitor:
    """Collects the activity of one node, and passes ``Alive`` messages to ``post``.

    ``pollers`` poll ``fileno()`` and call ``tick`` when it is readable.
    """

    def __init__(self, pollers: Sequence[select.epoll], post: Callable[[m.Alive], None]) -> None:
        self._pollers = pollers
        self._post = post
        self._attempt = 0
        self.watching = False
        self.wrote: set[int] = set()
        """Ranks that wrote output since the last message. The pump fills it while ``watching``."""
        self.due: float | None = None
        self._sampled = float("-inf")
        self._output_period_s = PERIOD_S
        self._heartbeats: dict[int, dict[str, float]] = {}
        self._checkpoints: list[m.SavedCheckpoint] = []
        self._pipes: dict[int, _Pipe] = {}  # by descriptor
        self._of_rank: dict[int, _Pipe] = {}
        self._poll = select.epoll()
        for poller in pollers:
            poller.register(self._poll, select.EPOLLIN)
        self._is_polling = True

    def fileno(self) -> int:
        """Return a descriptor that is readable when a worker has reported."""
        return self._poll.fileno()

    def begin(self, attempt: int, *, watching: bool, output_period_s: float = PERIOD_S) -> None:
        """Begin an attempt. With ``watching``, also report which ranks write output.

        ``output_period_s`` is the shortest time before a message that reports only output.
        """
        self._attempt, self.watching, self._output_period_s = attempt, watching, output_period_s
        self._sampled = float("-inf")

    def add(self, rank: int, descriptor: int) -> None:
        """Start to read a worker's pipe. The monitor owns the descriptor."""
        pipe = _Pipe(rank, descriptor)
        self._pipes[descriptor] = self._of_rank[rank] = pipe
        self._poll.register(descriptor, select.EPOLLIN)

    def tick(self, now: float, *, readable: bool, held: bool) -> None:
        """Run the actions that are due.

        ``readable``: ``fileno()`` was readable. ``held``: a slow reader holds back output.
        """
        if self.due is not None and now >= self.due:
            self.due = None
            self._sampled = now
            for descriptor, _ in self._poll.poll(0, max(1, len(self._pipes))):
                self._read_pipe(self._pipes[descriptor])
            self._post_alive(held=held and self.watching)
            self._set_polling(wanted=True)
        if self._is_polling and (readable or self._heartbeats or self._checkpoints):
            self._schedule(max(now + GATHER_S, self._sampled + PERIOD_S))
            self._set_polling(wanted=False)
        elif self.due is None and (self.wrote or (held and self.watching)):
            self._schedule(max(now + GATHER_S, self._sampled + self._output_period_s))

    def _schedule(self, due: float) -> None:
        self.due = due if self.due is None else min(self.due, due)

    def drain(self, rank: int) -> None:
        """Read the last report of an exited worker, for the next message."""
        pipe = self._of_rank.get(rank)
        if pipe is not None:
            self._read_pipe(pipe)

    def finish(self) -> None:
        """Send the last report of the attempt, if there is any, and close its pipes."""
        for pipe in list(self._pipes.values()):
            self._read_pipe(pipe)
        self._post_alive(held=False)
        self.due = None
        self._set_polling(wanted=True)
        self._close_pipes()

    def close(self) -> None:
        """Close all pipes and the poller."""
        self._close_pipes()
        self._poll.close()

    def _set_polling(self, *, wanted: bool) -> None:
        if wanted is not self._is_polling:
            self._is_polling = wanted
            for poller in self._pollers:
                poller.modify(self._poll, select.EPOLLIN if wanted else 0)

    def _read_pipe(self, pipe: _Pipe) -> None:
        is_open, values = pipe.read()
        if values is not None:
            self._heartbeats[pipe.rank] = values
        self._checkpoints += pipe.checkpoints
        pipe.checkpoints = []
        if not is_open:
            self._close(pipe)

    def _post_alive(self, *, held: bool) -> None:
        if not (self._heartbeats or self._checkpoints or self.wrote or held):
            return
        heartbeats = tuple(
            m.Heartbeat(rank=rank, values=values) for rank, values in self._heartbeats.items()
        )
        wrote = tuple(sorted(self.wrote))
        checkpoints = tuple(self._checkpoints)
        self._heartbeats, self._checkpoints = {}, []
        self.wrote.clear()
        self._post(
            m.Alive(
                attempt=self._attempt,
                heartbeats=heartbeats,
                wrote=wrote,
                held=held,
                checkpoints=checkpoints,
            )
        )

    def _close_pipes(self) -> None:
        for pipe in list(self._pipes.values()):
            self._close(pipe)

    def _close(self, pipe: _Pipe) -> None:
        del self._pipes[pipe.descriptor], self._of_rank[pipe.rank]
        self._poll.unregister(pipe.descriptor)
        os.close(pipe.descriptor)
