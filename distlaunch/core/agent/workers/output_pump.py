"""The output pump: a thread that reads the output of the node's workers and passes it to sinks.

The thread never waits for a console. If a sink has no room, the pump stops reading, so that the
workers wait. An exited worker's output is always read to the end, because its last lines explain a
failure.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from distlaunch.core.agent.workers.exit_evidence import read_error_file
from distlaunch.core.agent.workers.output_tail import OutputTail
from distlaunch.core.agent.workers.progress_pipe import PERIOD_S, ActivityMonitor
from distlaunch.core.agent.workers.worker_table import Drained, OutputsClosed
from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.run_files import STDERR, STDOUT
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol.codec import MAX_RAW_BYTES

TAIL_BYTES = 65536
STDOUT_TAIL_BYTES = 8192
_READ_BYTES = min(1 << 18, MAX_RAW_BYTES)
_BUSY_GAP_S = 0.001
_BUSY_WAIT_S = 0.004
_JOB_PIPE_BYTES = 4 << 20
_LEAST_PIPE_BYTES = 64 << 10
_PIPE_BYTES = 1 << 20
_PROGRESS_PIPE_BYTES = 16 << 10


class OutputSink(Protocol):
    """Receiver of the output. The pump's thread calls the methods, which must not block."""

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Accept a chunk."""

    def rank_ended(self, rank: int, now: float) -> None:
        """Record that the output of a rank in this attempt is complete."""

    def tick(self, now: float) -> float | None:
        """Run the actions that are due. Return the time of the next deadline, or None."""

    def has_room(self) -> bool:
        """Return whether more output may be read."""

    def on_room(self, wake: Callable[[], None]) -> None:
        """Set the function to call, from any thread, each time ``has_room`` changes to True."""


class PumpFailed(Record):
    """The thread has ended because of an internal error. No more output is read."""

    text: str


Posted = Drained | OutputsClosed | PumpFailed | m.Alive


class _Stream:
    def __init__(self, rank: int, number: int, descriptor: int, tail: OutputTail | None) -> None:
        self.rank = rank
        self.number = number
        self.descriptor = descriptor
        self.tail = tail


class Pump(threading.Thread):
    """Reads all streams of a node. ``post`` is called in this thread with events for the agent."""

    def __init__(self, sink: OutputSink, post: Callable[[Posted], None]) -> None:
        super().__init__(name="output", daemon=True)
        self._sink = sink
        self._post = post
        self._orders: deque[Callable[[], None]] = deque()
        self._streams: dict[int, _Stream] = {}
        self._of_rank: dict[int, list[_Stream]] = {}
        self._tails: dict[int, dict[int, OutputTail]] = {}  # by rank and stream
        self._poll = select.epoll()
        self._idle = select.epoll()  # without the streams, used while there is no room
        self._wake, self._wake_end = os.pipe()
        for descriptor in (self._wake, self._wake_end):
            os.set_blocking(descriptor, False)
        self._poll.register(self._wake, select.EPOLLIN)
        self._idle.register(self._wake, select.EPOLLIN)
        self._activity = ActivityMonitor((self._poll, self._idle), post)
        self._running = True
        self._first_stream = 0
        self._pipe_bytes = _LEAST_PIPE_BYTES
        self._wake_lock = threading.Lock()
        sink.on_room(self._wake_thread)

    # --- called from other threads

    def begin_attempt(
        self, streams: int, *, attempt: int, watching: bool, output_period_s: float = PERIOD_S
    ) -> None:
        """Prepare for an attempt with this number of streams.

        ``watching`` and ``output_period_s`` set the content of ``Alive``. Few streams get larger
        pipes: all pipes of a user share 64 MiB of buffers (pipe-user-pages-soft), beyond which the
        kernel makes pipes very small.
        """
        self._enqueue(
            lambda: self._activity.begin(
                attempt, watching=watching, output_period_s=output_period_s
            )
        )
        self._pipe_bytes = max(
            _LEAST_PIPE_BYTES, min(_JOB_PIPE_BYTES // max(1, streams), _PIPE_BYTES)
        )

    def add(self, rank: int, number: int, descriptor: int, *, tail_of: int | None) -> None:
        """Start to read a stream, whose descriptor the pump then owns.

        ``number``: 1 stdout, 2 stderr. ``tail_of``: the stream as whose tail the end of the output
        is kept (2 for a pseudo-terminal); None if it is not kept.
        """
        os.set_blocking(descriptor, False)
        if self._pipe_bytes > _LEAST_PIPE_BYTES:
            with suppress(OSError):  # a terminal, or the user's limit for pipe buffers is reached
                fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, self._pipe_bytes)
        self._enqueue(lambda: self._add(rank, number, descriptor, tail_of))

    def add_progress(self, rank: int, descriptor: int) -> None:
        """Start to read a worker's progress, whose descriptor the pump then owns."""
        os.set_blocking(descriptor, False)
        with suppress(OSError):  # smaller than the default, to leave the user's buffers to output
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PROGRESS_PIPE_BYTES)
        self._enqueue(lambda: self._activity.add(rank, descriptor))

    def drain(self, ended: WorkerExit, error_file: str | None = None) -> None:
        """Read all output and the error file of an exited worker, even without room. Posts
        ``Drained``."""
        self._enqueue(lambda: self._drain(ended, error_file))

    def finish(self) -> None:
        """Read what is left in the pipes and close all streams. Posts ``OutputsClosed``."""
        self._enqueue(self._finish)

    def stop(self) -> None:
        """Let the thread end, without waiting for it."""
        self._enqueue(self._end)

    def _enqueue(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._wake_thread()

    def _wake_thread(self) -> None:
        with self._wake_lock, suppress(BlockingIOError):  # the pipe is full, so the thread is awake
            if self._wake_end >= 0:
                os.write(self._wake_end, b"\0")

    # --- the thread

    def run(self) -> None:
        """Run until ``stop``. Posts an error, because the job would wait forever for a dead
        thread."""
        try:
            self._serve()
        except Exception:  # noqa: BLE001 - the agent must learn of any error
            import traceback

            self._post(PumpFailed(text=traceback.format_exc()))
        finally:
            self._release()

    def _serve(self) -> None:
        last = 0.0
        activity = self._activity.fileno()
        reported = False
        while self._running:
            now = time.monotonic()
            deadline = self._sink.tick(now)
            has_room = self._sink.has_room()
            self._activity.tick(now, readable=reported, held=not has_room)
            deadlines = [due for due in (deadline, self._activity.due) if due is not None]
            timeout = max(0.0, min(deadlines) - now) if deadlines else -1.0
            ready = (self._poll if has_room else self._idle).poll(timeout)
            now = time.monotonic()
            bytes_read = 0
            reported = False
            for descriptor, _ in self._in_turn(ready):
                if descriptor == self._wake:
                    self._run_orders()
                elif descriptor == activity:
                    reported = True
                elif (stream := self._streams.get(descriptor)) is not None and (
                    bytes_read == 0 or self._has_more_room()
                ):
                    bytes_read += self._read(stream, now)
            if 0 < bytes_read < self._pipe_bytes // 4 and now - last < _BUSY_GAP_S:
                time.sleep(
                    _BUSY_WAIT_S
                )  # many small writes: wait until more have arrived, to wake up less often
            last = now

    def _in_turn(self, ready: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the ready descriptors in the order in which to read them.

        If the sink has no room for all, the next call begins with another one.
        """
        first = self._first_stream % len(ready) if ready else 0
        return ready[first:] + ready[:first]

    def _has_more_room(self) -> bool:
        has_room = self._sink.has_room()
        self._first_stream += not has_room
        return has_room

    def _release(self) -> None:
        for stream in self._streams.values():
            os.close(stream.descriptor)
        self._streams.clear()
        self._activity.close()
        self._poll.close()
        self._idle.close()
        with self._wake_lock:  # the console may still call, when the number is another file's
            os.close(self._wake)
            os.close(self._wake_end)
            self._wake_end = -1

    def _run_orders(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake, 65536)
        while self._orders:
            self._orders.popleft()()

    def _add(self, rank: int, number: int, descriptor: int, tail_of: int | None) -> None:
        tail = None
        if tail_of is not None:
            tail = OutputTail(TAIL_BYTES if tail_of == STDERR else STDOUT_TAIL_BYTES)
            self._tails.setdefault(rank, {})[tail_of] = tail
        stream = _Stream(rank, number, descriptor, tail)
        self._streams[stream.descriptor] = stream
        self._of_rank.setdefault(stream.rank, []).append(stream)
        self._poll.register(stream.descriptor, select.EPOLLIN)

    def _read(self, stream: _Stream, now: float) -> int:
        """Read one chunk and return its size; 0 if no data is available. Close the stream at its
        end."""
        try:
            data = os.read(stream.descriptor, _READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError as exc:
            if exc.errno != errno.EIO:  # a terminal whose other end is closed
                raise
            data = b""
        if not data:
            self._close(stream)
            return 0
        if stream.tail is not None:
            stream.tail.add(data, now)
        if self._activity.watching:
            self._activity.wrote.add(stream.rank)
        self._sink.output(stream.rank, stream.number, data, now)
        return len(data)

    def _close(self, stream: _Stream) -> None:
        if self._streams.pop(stream.descriptor, None) is None:
            return
        self._poll.unregister(stream.descriptor)
        os.close(stream.descriptor)
        rest = self._of_rank[stream.rank]
        rest.remove(stream)
        if not rest:
            del self._of_rank[stream.rank]
            self._sink.rank_ended(stream.rank, time.monotonic())

    def _drain(self, ended: WorkerExit, error_file: str | None) -> None:
        rank, now = ended.rank, time.monotonic()
        for stream in list(self._of_rank.get(rank, ())):
            self._read_out(stream, now)
        self._activity.drain(rank)
        tails = self._tails.pop(rank, {})
        stderr, stdout = tails.get(STDERR), tails.get(STDOUT)
        raised_at = stderr.traceback_at if stderr else None
        shown = stdout.text(now) if stdout and ended.returncode else b""
        ended = replace(
            ended,
            stderr_tail=(stderr.text(now) if stderr else b"") + ended.stderr_tail,
            stdout_tail=shown.decode("utf-8", "replace"),
            traceback_age_s=None if raised_at is None else max(0.0, now - raised_at),
            error_file=read_error_file(error_file) if error_file else None,
        )
        self._post(Drained(exit=ended))

    def _read_out(self, stream: _Stream, now: float) -> None:
        """Read at most what a pipe can hold: a descendant that goes on writing could keep this
        thread busy forever."""
        bytes_read = 0
        while bytes_read < _PIPE_BYTES and (size := self._read(stream, now)):
            bytes_read += size

    def _finish(self) -> None:
        now = time.monotonic()
        for stream in list(self._streams.values()):
            self._read_out(stream, now)
            self._close(stream)
        self._tails.clear()
        self._activity.finish()
        self._post(OutputsClosed())

    def _end(self) -> None:
        self._running = False
