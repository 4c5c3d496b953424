"""A bounded buffer and a thread with blocking writes for one descriptor.

A slow reader must not delay supervision. O_NONBLOCK must not be set on descriptors 0 to 2, which
share their file description with the user's shell. Therefore a daemon thread writes. For a pipe,
file or socket, ``has_room`` returns False when the buffer is full, and no bytes are lost. Only at
the end of a failed job may queued lines of workers be dropped, so that the launcher's messages
reach a slow reader. A descriptor that fails is not used again.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import termios
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

HIGH_WATER = 4 << 20
"""The buffer is full with more pending bytes. It has room again at half of this."""
_WRITE = 64 << 10
_WRITE_SLOW = 4 << 10
"""Size of a write to a slow reader and while closing: each is progress, and the rest can be
dropped."""
_SLOW_S = 0.02
"""A reader is slow if a write takes longer."""
DRAIN_S = 2.0
"""How long queued lines of a failed job's workers are kept before they are dropped."""
HURRIED_S = 1.0
"""Closing waits so long in total once the user wants to end quickly."""
MAX_CLOSE_S = 300.0
"""Closing after a failed job, even if the reader goes on reading."""
_POLL_S = 0.1
_LONGEST_LINE = 512 << 10
"""A line that is partly written is completed before lines are dropped, unless it is longer."""


def dropped_text(lines: int) -> str:
    """Return the message that reports the number of dropped lines of workers."""
    noun = "line" if lines == 1 else "lines"
    return f"{lines:,} {noun} of workers not shown, because the reader is slow; see the log files"


def dropped_lines_text(lines: int) -> bytes:
    """Return ``dropped_text`` as an output line."""
    return f"distlaunch: {dropped_text(lines)}\n".encode()


class _LauncherLines(bytes):
    """A message of the launcher, which is never dropped."""

    __slots__ = ()


class Writer:
    """Writes bytes to ``fd``, in order, in a thread.

    ``dropped`` formats the number of lines that were dropped at the end.
    """

    def __init__(
        self,
        fd: int,
        *,
        high_water: int = HIGH_WATER,
        dropped: Callable[[int], bytes] = dropped_lines_text,
    ) -> None:
        self._fd = fd
        self._high_water = high_water
        self._describe_dropped = dropped
        self._cond = threading.Condition(threading.Lock())
        self._chunks: deque[bytes] = deque()
        self._is_slow = True
        """Whether the last write took long, or there was none yet."""
        self._dropping = False
        """Whether the rest of the batch that is being written is to be dropped."""
        self._dropped = 0
        """Dropped lines that are not reported yet."""
        self._ends_line = True
        """Whether the last byte written is a newline."""
        self._pending = 0
        self._thread: threading.Thread | None = None
        self._busy = False
        self._sleeping = False
        self._full = False
        self._dead = False
        self._closing = False
        self._closed = False
        self._progress_s = 0.0
        self.lost = 0
        """Bytes that could not be shown because the descriptor failed or ``finish_close`` gave up.
        """
        self.on_room: Callable[[], None] | None = None
        """Called from the writer's thread when a full buffer has drained to half."""
        self._is_pipe = False
        try:
            self._is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
        except OSError:
            self._dead = True

    @property
    def on_terminal(self) -> bool:
        """Whether the descriptor is a terminal."""
        return os.isatty(self._fd)

    def has_room(self) -> bool:
        """Return whether more bytes may be put: False once ``high_water`` is reached, until the
        buffer is half empty."""
        return not self._full

    def put(self, data: bytes, *, must: bool = False) -> bool:
        """Queue bytes. Return whether they were accepted.

        A plain writer accepts all bytes until it is closed or fails. ``must``: messages of the
        launcher are never dropped.
        """
        with self._cond:
            return self._put(data, must=must)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until all bytes have been written. Return whether they have."""
        with self._cond:
            return self._cond.wait_for(self._is_idle, timeout_s)

    def begin_close(self) -> None:
        """Accept no more bytes. The thread ends when all is written."""
        with self._cond:
            self._closing = True
            self._progress_s = monotonic()
            self._cond.notify_all()

    def finish_close(
        self,
        timeout_s: float | None,
        *,
        drops: bool = False,
        hurried: Callable[[], bool] = lambda: False,
    ) -> int:
        """Wait for the end of the thread. Return the number of lost bytes.

        Gives up when the reader has taken nothing for ``timeout_s``. If ``drops``, workers' lines
        that are still queued after ``DRAIN_S`` are dropped. Once ``hurried`` returns True, they are
        dropped in any case, and the reader has ``HURRIED_S`` left.
        """
        began = monotonic()
        drop_at = began + DRAIN_S if drops else None
        give_up_at = began + MAX_CLOSE_S if drops else None
        is_hurried, unread = False, self._count_unread()
        with self._cond:
            while not self._closed and self._thread is not None:
                now = monotonic()
                if not is_hurried and hurried():
                    is_hurried, drop_at, give_up_at = True, now, now + HURRIED_S
                if drop_at is not None and now >= drop_at:
                    drop_at = None
                    self._drop_queued()
                if unread != (unread := self._count_unread()):
                    self._progress_s = now
                stalled = timeout_s is not None and now >= self._progress_s + timeout_s
                if stalled or (give_up_at is not None and now >= give_up_at):
                    self._give_up()
                    break
                wait_s = (
                    _POLL_S
                    if timeout_s is None
                    else min(_POLL_S, self._progress_s + timeout_s - now)
                )
                self._cond.wait(wait_s)
            self._closed = True
            return self.lost

    def _count_unread(self) -> int:
        if not self._is_pipe:
            return 0
        try:
            return int.from_bytes(fcntl.ioctl(self._fd, termios.FIONREAD, bytes(4)), sys.byteorder)
        except OSError:
            return 0

    def _write_size(self) -> int:
        """Return how many bytes to write at once: to a pipe only what fits, so that the rest can
        still be dropped."""
        if self._closing or self._is_slow:
            return _WRITE_SLOW
        if not self._is_pipe:
            return _WRITE
        try:
            size = fcntl.fcntl(self._fd, fcntl.F_GETPIPE_SZ)
        except OSError:
            return _WRITE
        return max(_WRITE_SLOW, min(_WRITE, size - self._count_unread()))

    def _drop_queued(self) -> None:
        """Drop queued lines of workers, and the bytes of the current batch after its next line end."""
        kept = [chunk for chunk in self._chunks if isinstance(chunk, _LauncherLines)]
        dropped = [chunk for chunk in self._chunks if not isinstance(chunk, _LauncherLines)]
        self._pending -= sum(map(len, dropped))
        self._dropped += sum(chunk.count(b"\n") for chunk in dropped)
        self._chunks = deque(kept)
        self._dropping = self._busy
        self._cond.notify_all()

    def _put(self, data: bytes, *, must: bool) -> bool:
        if self._dead or self._closing:
            self.lost += len(data)
            return False
        self._append(data, own=must)
        if self._pending >= self._high_water:
            self._full = True
        return not self._dead

    def _append(self, data: bytes, *, own: bool = False) -> None:
        self._chunks.append(_LauncherLines(data) if own else data)
        self._pending += len(data)
        self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"console-{self._fd}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread (ulimit -u): the job continues without console
                self._give_up()
                return
            self._thread = thread
        elif self._sleeping:
            self._sleeping = False
            self._cond.notify_all()

    def _has_work(self) -> bool:
        return bool(self._chunks)

    def _is_idle(self) -> bool:
        return self._dead or not (self._busy or self._has_work())

    def _run(self) -> None:
        import signal

        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while (batch := self._next_batch()) is not None:
            framed = self._add_live_rows(batch)
            if not self._write(framed, len(batch), may_drop=not isinstance(batch, _LauncherLines)):
                break
            self._ends_line = batch.endswith(b"\n")
        with self._cond:
            self._closed = True
            self._busy = False
            self._cond.notify_all()

    def _next_batch(self) -> bytes | None:
        """Wait for a batch for about one write; None when all is written.

        A batch has either messages of the launcher or lines of workers.
        """
        with self._cond:
            self._busy = self._dropping = False
            if self._dropped:
                note = self._describe_dropped(self._dropped)
                self._dropped = 0
                self._chunks.appendleft(_LauncherLines(note if self._ends_line else b"\n" + note))
                self._pending += len(self._chunks[0])
            while not self._has_work():
                self._cond.notify_all()
                if self._closing or self._dead:
                    return None
                self._sleeping = True
                self._cond.wait()
            self._sleeping = False
            self._busy = True
            batch = [self._chunks.popleft()] if self._chunks else []
            size = sum(map(len, batch))
            is_own = bool(batch) and isinstance(batch[0], _LauncherLines)
            while self._chunks and size + len(self._chunks[0]) <= _WRITE:
                if isinstance(self._chunks[0], _LauncherLines) != is_own:
                    break
                batch.append(self._chunks.popleft())
                size += len(batch[-1])
            data = b"".join(batch)
            return _LauncherLines(data) if is_own else data

    def _add_live_rows(self, batch: bytes) -> bytes:
        return batch

    def _write(self, data: bytes, share: int, *, may_drop: bool) -> bool:
        """Write all bytes, or up to a line end if the rest is to be dropped. Return False after a
        failure.

        ``share`` is the number of pending bytes for which ``data`` is counted.
        """
        view = memoryview(data)
        while view:
            began = monotonic()
            try:
                done = os.write(self._fd, view[: self._write_size()])
            except BlockingIOError:
                self._wait_until_writable()  # another process that shares the description has set O_NONBLOCK
                continue
            except OSError:
                self._fail()
                return False
            self._is_slow = monotonic() - began > _SLOW_S
            view = view[done:]
            part = min(share, done) if view else share
            share -= part
            if not self._on_written(part):
                return False
            if self._dropping and may_drop and view:
                rest = self._to_line_end(view)
                share -= self._drop_rest(view[len(rest) :], share)
                view = rest
                may_drop = False
        return True

    @staticmethod
    def _to_line_end(view: memoryview) -> memoryview:
        end = bytes(view[:_LONGEST_LINE]).find(b"\n")
        return view[: end + 1] if end >= 0 else view[:_LONGEST_LINE]

    def _drop_rest(self, rest: memoryview, share: int) -> int:
        with self._cond:
            part = min(share, len(rest))
            self._pending -= part
            self._dropped += bytes(rest).count(b"\n")
        return part

    def _on_written(self, count: int) -> bool:
        """Count bytes as written, and call ``on_room`` if the buffer has room again. Return False if
        the writer has given up."""
        with self._cond:
            if self._dead:
                return False
            self._pending -= count
            self._progress_s = monotonic()
            wake = self._full and self._pending <= self._high_water // 2
            if wake:
                self._full = False
            self._on_drained()
            if self._closing:
                self._cond.notify_all()
        if wake and self.on_room is not None:
            self.on_room()
        return True

    def _on_drained(self) -> None:
        """Handle that the buffer has become shorter, with the lock held."""

    def _fail(self) -> None:
        with self._cond:
            was_full = self._full
            self._give_up()
        if was_full and self.on_room is not None:
            self.on_room()

    def _give_up(self) -> None:
        """Drop all bytes, and write nothing any more."""
        self.lost += self._pending
        self._pending = 0
        self._chunks.clear()
        self._dead = True
        self._full = False
        self._cond.notify_all()

    def _wait_until_writable(self) -> None:
        import select

        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        poller.poll()
