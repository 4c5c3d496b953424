"""One bounded buffer and one thread with blocking writes for a console descriptor.

A slow reader must never hold up supervision, and O_NONBLOCK must not be set on 0-2 (the description
is shared with the user's shell): so a daemon thread writes and may block for as long as it likes. A
pipe, file or socket says when it is full and loses nothing until the end of a job that failed: then
lines of workers that are still queued may be dropped, so that our own reach a slow reader. A
descriptor that fails (reader gone, disk full, no thread for it) is given up for good, silently.
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
"""Pending bytes at which a writer has no more room; it has again at half of that."""
_WRITE = 64 << 10
_WRITE_SLOW = 4 << 10
"""To a slow reader and while closing: each write that ends is progress, and what is left of it can
be dropped."""
_SLOW_S = 0.02
"""A write that takes longer shows that the reader is slow."""
DRAIN_S = 2.0
"""How long a job that failed waits for its reader before queued lines of workers are dropped."""
HURRIED_S = 1.0
"""How long a reader is waited for in all once somebody wants the rest cut short."""
MOST_CLOSE_S = 300.0
"""The same for the reader of a job that failed, even if it goes on reading."""
_LOOK_S = 0.1
_LONGEST_LINE = 512 << 10
"""A line that has begun is written to its end before the rest is dropped; a longer one is cut."""


def dropped_text(lines: int) -> str:
    """Say how many lines of workers a reader has not been given."""
    noun = "line" if lines == 1 else "lines"
    return f"{lines:,} {noun} of workers not shown, as the reader is slow; the log files have them"


def dropped_note(lines: int) -> bytes:
    """Return the same as a line for the terminal."""
    return f"distlaunch: {dropped_text(lines)}\n".encode()


class _Own(bytes):
    """A chunk of our own lines, which is never dropped."""

    __slots__ = ()


class Writer:
    """Writes what it is given to ``fd``, in order, from a thread of its own that starts with the
    first bytes.

    ``dropped`` words how many lines were dropped at the end.
    """

    def __init__(
        self,
        fd: int,
        *,
        high_water: int = HIGH_WATER,
        dropped: Callable[[int], bytes] = dropped_note,
    ) -> None:
        self._fd = fd
        self._high_water = high_water
        self._describe_dropped = dropped
        self._cond = threading.Condition(threading.Lock())
        self._chunks: deque[bytes] = deque()
        self._is_slow = True
        """The last write took long, or there was none."""
        self._dropping = False
        """What is left of a batch of workers' lines that is being written is to be dropped."""
        self._dropped = 0
        """Lines that have been dropped and not been told of."""
        self._ends_line = True
        """What has been written ends with a newline."""
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
        """Bytes that could not be shown: the descriptor failed, or ``finish`` gave up on it."""
        self.on_room: Callable[[], None] | None = None
        """Called from the writer's thread when a full buffer has drained to half."""
        self._is_pipe = False
        try:
            self._is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
        except OSError:
            self._dead = True

    @property
    def on_terminal(self) -> bool:
        """Return whether the descriptor is a terminal."""
        return os.isatty(self._fd)

    def has_room(self) -> bool:
        """Return whether more should be put; False from the high-water mark down to half of it."""
        return not self._full

    def put(self, data: bytes, *, must: bool = False) -> bool:
        """Queue bytes; return False if they were not taken. ``must`` marks our own lines, which are
        never dropped."""
        with self._cond:
            return self._put(data, must=must)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until everything has been written, at most ``timeout_s``; tell whether it has."""
        with self._cond:
            return self._cond.wait_for(self._is_idle, timeout_s)

    def begin_close(self) -> None:
        """Take nothing more, and let the thread end when it has written what is pending."""
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
        """Wait for the end of the thread; return the bytes lost.

        The reader may stand still for ``timeout_s``. With ``drops``, workers' lines that are still
        queued after ``DRAIN_S`` are dropped. Once ``hurried`` returns true, they are dropped in any
        case, and the reader has ``HURRIED_S``.
        """
        began = monotonic()
        drop_at = began + DRAIN_S if drops else None
        give_up_at = began + MOST_CLOSE_S if drops else None
        is_hurried, unread = False, self._unread()
        with self._cond:
            while not self._closed and self._thread is not None:
                now = monotonic()
                if not is_hurried and hurried():
                    is_hurried, drop_at, give_up_at = True, now, now + HURRIED_S
                if drop_at is not None and now >= drop_at:
                    drop_at = None
                    self._drop_queued()
                if unread != (unread := self._unread()):
                    self._progress_s = now
                stalled = timeout_s is not None and now >= self._progress_s + timeout_s
                if stalled or (give_up_at is not None and now >= give_up_at):
                    self._give_up()
                    break
                wait_s = (
                    _LOOK_S
                    if timeout_s is None
                    else min(_LOOK_S, self._progress_s + timeout_s - now)
                )
                self._cond.wait(wait_s)
            self._closed = True
            return self.lost

    def _unread(self) -> int:
        """Return how many bytes a pipe holds for its reader; 0 if the descriptor is no pipe."""
        if not self._is_pipe:
            return 0
        try:
            return int.from_bytes(fcntl.ioctl(self._fd, termios.FIONREAD, bytes(4)), sys.byteorder)
        except OSError:
            return 0

    def _piece(self) -> int:
        """Return how much to write at once; to a pipe what it takes now, so that the rest can be
        dropped."""
        if self._closing or self._is_slow:
            return _WRITE_SLOW
        if not self._is_pipe:
            return _WRITE
        try:
            size = fcntl.fcntl(self._fd, fcntl.F_GETPIPE_SZ)
        except OSError:
            return _WRITE
        return max(_WRITE_SLOW, min(_WRITE, size - self._unread()))

    def _drop_queued(self) -> None:
        """Drop the lines of workers that are not under way; the rest of those that are follows at a
        line's end."""
        kept = [chunk for chunk in self._chunks if isinstance(chunk, _Own)]
        dropped = [chunk for chunk in self._chunks if not isinstance(chunk, _Own)]
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
        self._chunks.append(_Own(data) if own else data)
        self._pending += len(data)
        self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"console-{self._fd}", daemon=True)
            try:
                thread.start()
            except (
                RuntimeError
            ):  # no more threads (ulimit -u): the job matters more than its console
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
        while (batch := self._next()) is not None:
            framed = self._frame(batch)
            if not self._write(framed, len(batch), may_drop=not isinstance(batch, _Own)):
                break
            self._ends_line = batch.endswith(b"\n")
        with self._cond:
            self._closed = True
            self._busy = False
            self._cond.notify_all()

    def _next(self) -> bytes | None:
        """Wait for work and take a batch of about one write; return None when closing and done.

        A batch has either our own lines or those of workers.
        """
        with self._cond:
            self._busy = self._dropping = False
            if self._dropped:
                note = self._describe_dropped(self._dropped)
                self._dropped = 0
                self._chunks.appendleft(_Own(note if self._ends_line else b"\n" + note))
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
            is_own = bool(batch) and isinstance(batch[0], _Own)
            while self._chunks and size + len(self._chunks[0]) <= _WRITE:
                if isinstance(self._chunks[0], _Own) != is_own:
                    break
                batch.append(self._chunks.popleft())
                size += len(batch[-1])
            data = b"".join(batch)
            return _Own(data) if is_own else data

    def _frame(self, batch: bytes) -> bytes:
        """Return what is written for a batch (a terminal adds its status line)."""
        return batch

    def _write(self, data: bytes, share: int, *, may_drop: bool) -> bool:
        """Write all of it, or to the end of a line if the rest is to be dropped meanwhile.

        ``share`` of the pending bytes go with it. Return False when the descriptor has failed.
        """
        view = memoryview(data)
        while view:
            began = monotonic()
            try:
                done = os.write(self._fd, view[: self._piece()])
            except BlockingIOError:
                self._poll()  # somebody else who shares the description has set O_NONBLOCK
                continue
            except OSError:
                self._fail()
                return False
            self._is_slow = monotonic() - began > _SLOW_S
            view = view[done:]
            part = min(share, done) if view else share
            share -= part
            if not self._written(part):
                return False
            if self._dropping and may_drop and view:
                rest = self._to_line_end(view)
                share -= self._drop_rest(view[len(rest) :], share)
                view = rest
                may_drop = False
        return True

    @staticmethod
    def _to_line_end(view: memoryview) -> memoryview:
        """Return what is to be written of a batch whose rest is dropped."""
        end = bytes(view[:_LONGEST_LINE]).find(b"\n")
        return view[: end + 1] if end >= 0 else view[:_LONGEST_LINE]

    def _drop_rest(self, rest: memoryview, share: int) -> int:
        """Drop the rest of a batch; return how many of the pending bytes went with it."""
        with self._cond:
            part = min(share, len(rest))
            self._pending -= part
            self._dropped += bytes(rest).count(b"\n")
        return part

    def _written(self, count: int) -> bool:
        with self._cond:
            if self._dead:
                return False
            self._pending -= count
            self._progress_s = monotonic()
            wake = self._full and self._pending <= self._high_water // 2
            if wake:
                self._full = False
            self._drained()
            if self._closing:
                self._cond.notify_all()
        if wake and self.on_room is not None:
            self.on_room()
        return True

    def _drained(self) -> None:
        """React to a shorter buffer (a terminal says what it has skipped); the lock is held."""

    def _fail(self) -> None:
        with self._cond:
            was_full = self._full
            self._give_up()
        if was_full and self.on_room is not None:
            self.on_room()

    def _give_up(self) -> None:
        self.lost += self._pending
        self._pending = 0
        self._chunks.clear()
        self._dead = True
        self._full = False
        self._cond.notify_all()

    def _poll(self) -> None:
        import select

        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        poller.poll()
