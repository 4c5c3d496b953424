"""Layer ui.console: one bounded buffer and one thread with blocking writes for a console descriptor.

A slow reader must never hold up supervision, and O_NONBLOCK must not be set on 0-2 (the description is shared with
the user's shell): so a daemon thread writes and may block for as long as it likes. A pipe, file or socket says when
it is full and loses nothing. A descriptor that fails (reader gone, disk full, no thread for it) is given up for good,
silently.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

HIGH_WATER = 4 << 20
"""Pending bytes at which a writer has no more room; it has again at half of that."""
_WRITE = 64 << 10
_WRITE_CLOSING = 4 << 10
"""Small while closing: each write that ends is progress, which a blocked large one would hide."""


class Writer:
    """Writes what it is given to ``fd``, in order, from a thread of its own that starts with the first bytes."""

    def __init__(self, fd: int, *, high_water: int = HIGH_WATER) -> None:
        self._fd = fd
        self._high_water = high_water
        self._cond = threading.Condition(threading.Lock())
        self._chunks: deque[bytes] = deque()
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
        try:
            os.fstat(fd)
        except OSError:
            self._dead = True

    @property
    def on_terminal(self) -> bool:
        """Tell whether the descriptor is a terminal."""
        return os.isatty(self._fd)

    def has_room(self) -> bool:
        """Tell whether more should be put; False from the high-water mark down to half of it."""
        return not self._full

    def put(self, data: bytes, *, must: bool = False) -> bool:
        """Queue bytes; False if they were not taken. ``must`` marks our own lines: a terminal does not skip them."""
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

    def finish_close(self, timeout_s: float | None) -> int:
        """Wait for the end of the thread, at most ``timeout_s`` without progress; return the bytes lost."""
        with self._cond:
            while not self._closed and self._thread is not None:
                wait_s = None if timeout_s is None else self._progress_s + timeout_s - monotonic()
                if wait_s is not None and wait_s <= 0:
                    self._give_up()
                    break
                self._cond.wait(wait_s)
            self._closed = True
            return self.lost

    def _put(self, data: bytes, *, must: bool) -> bool:
        if self._dead or self._closing:
            self.lost += len(data)
            return False
        self._append(data)
        if self._pending >= self._high_water:
            self._full = True
        return not self._dead

    def _append(self, data: bytes) -> None:
        self._chunks.append(data)
        self._pending += len(data)
        self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"console-{self._fd}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads (ulimit -u): the job matters more than its console
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
            if not self._write(framed, len(batch)):
                break
        with self._cond:
            self._closed = True
            self._busy = False
            self._cond.notify_all()

    def _next(self) -> bytes | None:
        """Wait for work and take a batch of about one write; None when closing and done."""
        with self._cond:
            self._busy = False
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
            while self._chunks and size + len(self._chunks[0]) <= _WRITE:
                batch.append(self._chunks.popleft())
                size += len(batch[-1])
            return b"".join(batch)

    def _frame(self, batch: bytes) -> bytes:
        """Give what is written for a batch (a terminal adds its status line)."""
        return batch

    def _write(self, data: bytes, share: int) -> bool:
        """Write all of it; ``share`` of the pending bytes go with it. False when the descriptor has failed."""
        view = memoryview(data)
        while view:
            try:
                done = os.write(self._fd, view[: _WRITE_CLOSING if self._closing else _WRITE])
            except BlockingIOError:
                self._poll()  # somebody else who shares the description has set O_NONBLOCK
                continue
            except OSError:
                self._fail()
                return False
            view = view[done:]
            part = min(share, done) if view else share
            share -= part
            if not self._written(part):
                return False
        return True

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
