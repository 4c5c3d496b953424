"""Exchange messages with the coordinator over two non-blocking descriptors."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from distlaunch.core.protocol.codec import Decoder, encode

_READ_BYTES = 1 << 18

M = TypeVar("M")


class FrameStream(Generic[M]):
    """Both directions of a connection. ``send`` and ``put`` may be called from any thread, the rest
    only by the loop.

    ``wake`` is called if another thread has queued data that the loop must write.
    """

    def __init__(
        self, reading: int, writing: int, decoder: Decoder[M], wake: Callable[[], None]
    ) -> None:
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        self._reading = reading
        self._writing = writing
        self._decoder = decoder
        self._wake = wake
        self._lock = threading.Lock()
        self._out: deque[memoryview] = deque()
        self.is_open = True
        """False after the end of the incoming data."""
        self.is_broken = False
        """Whether the other side has stopped reading. Further data is dropped."""

    def descriptors(self) -> dict[int, int]:
        """Return the poll events by descriptor."""
        wanted = {self._reading: select.POLLIN} if self.is_open else {}
        if self._out:
            wanted[self._writing] = wanted.get(self._writing, 0) | select.POLLOUT
        return wanted

    def send(self, message: Any) -> None:
        """Queue a message and write as much as possible."""
        self.put(encode(message))

    def put(self, data: bytes) -> None:
        """Queue bytes and write as much as possible. Bytes for a broken stream are dropped."""
        with self._lock:
            waits = bool(self._out)
            if self.is_broken:
                return
            self._out.append(memoryview(data))
            if waits:
                return
            self._write()
            waits = bool(self._out) or self.is_broken
        if waits:
            self._wake()

    def flush(self) -> None:
        """Write as much of the queue as possible."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        try:
            while self._out:
                data = self._out[0]
                written = os.write(self._writing, data)
                if written == len(data):
                    self._out.popleft()
                else:
                    self._out[0] = data[written:]
        except BlockingIOError:
            return
        except OSError:
            self._out.clear()
            self.is_broken = True

    def receive(self) -> list[M] | None:
        """Read once, and return the messages; None at the end of the stream. Raises ProtocolError
        for invalid data."""
        if not self.is_open:
            return None
        try:
            data = os.read(self._reading, _READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.is_open = False
            return None
        return list(self._decoder.feed(data))

    def close(self, *, bound_s: float) -> None:
        """Wait up to ``bound_s`` until the queue is written, then close both directions."""
        deadline = time.monotonic() + bound_s
        poll = select.poll()
        while self._out and (left_s := deadline - time.monotonic()) > 0:
            poll.register(self._writing, select.POLLOUT)
            poll.poll(left_s * 1000)
            self.flush()
        with self._lock:
            self._out.clear()
            self.is_open, self.is_broken = False, True
        ours, self._reading, self._writing = {self._reading, self._writing} - {-1}, -1, -1
        for descriptor in ours:
            with suppress(OSError):
                os.close(descriptor)
