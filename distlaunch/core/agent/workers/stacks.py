"""Collect the stacks, process states and processor time of a node's workers.

A worker and the agent share a file in memory. distlaunch's bootstrap registers faulthandler in the
worker: on ``SIGNAL`` it writes the worker's stacks to this file. The agent sends ``SIGNAL`` only if
the worker has the handler, because the signal would kill it otherwise, and still has the file at
the agreed descriptor.

For other workers the agent runs py-spy if it is installed, and also for a worker that does not
answer because it is stopped, or stuck where no signal is handled. All of this happens in a thread,
within a time limit.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from distlaunch.core.agent.workers import process_tree
from distlaunch.core.protocol import agent_messages as m

if TYPE_CHECKING:
    import subprocess

SIGNAL = signal.SIGRTMAX - 3
"""The signal that ``boot/sitecustomize.py`` registers."""
TEXT_BYTES = 64 << 10
"""Largest number of bytes of one worker's stacks."""
_ANSWER_BYTES = 8 << 20
"""Largest number of bytes for all workers. In JSON a byte may take six bytes, and a message may
have 64 MiB."""
DUMP_S = 1.5
"""How long a worker may take to write its stacks."""
ALL_S = 2.5
"""Longest time for a whole collection."""
NATIVE_S = 8.0
"""Longest time for native frames after that. py-spy reads the symbols of all libraries first."""
_STEP_S = 0.02
_STILL_S = 0.1
"""A dump that has not grown for this long is complete: faulthandler writes no end."""
_SPIES = 4
"""Largest number of py-spy processes at a time. Each uses a processor that the workers may need."""
_SOURCE_S = 0.3
"""How long to wait for lines of source."""
_SOURCE_BYTES = 2 << 20
_SOURCE_CHARS = 200
_INNERMOST = re.compile(
    r'^(?:Current thread|Stack) ?(?:0x[0-9a-f]+)?.*\(most recent call first\):\n  File "(.+)", '
    r"line (\d{1,9}) in ",
    re.MULTILINE,
)
_KILL_S = 0.2
_NOT_ANSWERING = ("T", "t", "D")


class _Worker:
    def __init__(self, rank: int, pid: int, descriptor: int, number: int, most: int) -> None:
        self.rank = rank
        self.pid = pid
        self.descriptor = descriptor
        self.number = number
        """The descriptor's number in the worker."""
        self.most = most
        self.state = ""
        self.before = self.size = 0
        self.grew_at = 0.0
        self.text = ""
        self.taken_s = self.cpu_s = self.children_cpu_s = 0.0
        self.holds_gpu = False
        self.source = self.native = ""
        self.process_groups: tuple[m.ProcessGroup, ...] = ()

    def open(self) -> None:
        """Read the process's state. Request its stacks if it has the signal handler."""
        facts = process_tree.stat_of(self.pid)
        self.state = facts[0] if facts else ""
        if facts:
            self.taken_s = time.monotonic()
            self.cpu_s = process_tree.cpu_s_of(self.pid)
            self.children_cpu_s = process_tree.children_cpu_s_of(self.pid)
            self.holds_gpu = process_tree.holds_gpu(self.pid)
        armed = (
            bool(facts)
            and self.descriptor >= 0
            and process_tree.catches(self.pid, SIGNAL)
            and self._has_our_file()
        )
        if armed:
            self.before = self.size = os.fstat(self.descriptor).st_size
            armed = process_tree.send(self.pid, SIGNAL, parent_or_ancestor=os.getpid())
        if not armed:
            self.close()

    def _has_our_file(self) -> bool:
        """Return whether the worker would write to the shared file.

        It may have closed the descriptor and opened another file with the same number.
        """
        try:
            return os.path.samestat(
                os.stat(f"/proc/{self.pid}/fd/{self.number}"), os.fstat(self.descriptor)
            )
        except OSError:
            return False

    @property
    def is_waiting(self) -> bool:
        return self.descriptor >= 0

    def read_if_complete(self, now: float) -> None:
        size = os.fstat(self.descriptor).st_size
        if size != self.size:
            self.size, self.grew_at = size, now
        elif size > self.before and now - self.grew_at >= _STILL_S:
            self.read()

    def read(self) -> None:
        """Read the stacks that have arrived, and close the file.

        Of more than ``most`` bytes the end is read, where faulthandler writes the main thread.
        """
        size = os.fstat(self.descriptor).st_size
        start = max(self.before, size - self.most)
        self.text = (
            os.pread(self.descriptor, self.most, start).decode("utf-8", "replace") or self.text
        )
        self.close()

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class StackCollector:
    """Keeps the stack files of an attempt's workers, and collects all stacks on request."""

    def __init__(self, post: Callable[[m.Stacks], None], cookie: str = "") -> None:
        """``cookie`` marks the environment of this agent's workers."""
        self._post = post
        self._cookie = cookie
        self._files: dict[int, tuple[int, int]] = {}  # rank -> descriptor, its number in the worker
        self._ending = threading.Event()
        self._requests: list[m.CollectStacks] = []
        """The requests that the running collection answers. Empty: none runs."""
        self._lock = threading.Lock()

    def add(self, rank: int, descriptor: int, number: int) -> None:
        """Add the stack file of a worker, which the collector then owns. ``number`` is its
        descriptor in the worker."""
        self._files[rank] = descriptor, number

    def collect(self, request: m.CollectStacks, pids: Mapping[int, int]) -> None:
        """Start a thread that posts the ``Stacks`` of these workers (rank -> pid).

        A request that comes while a collection runs gets the stacks of that collection: two at a
        time would mix their dumps in the workers' files.
        """
        with self._lock:
            self._requests.append(request)
            if len(self._requests) > 1:
                return
        most = min(TEXT_BYTES, _ANSWER_BYTES // max(1, len(pids)))
        most = most // 2 if request.native else most
        workers = [_Worker(rank, pid, *self._file_of(rank), most) for rank, pid in pids.items()]
        cookie = self._cookie if request.for_user else None

        def work() -> None:
            try:
                _collect_stacks(workers, self._ending, cookie)
            finally:
                left = self._answer_all(workers)
            self._answer_native(left, workers)

        try:
            threading.Thread(target=work, name="stacks", daemon=True).start()
        except RuntimeError:  # no thread can be started
            _close_all(workers)
            for each in self._answer_all(workers):
                self._post(_make_answer(each, workers))

    def _answer_native(
        self, requests: Sequence[m.CollectStacks], workers: Sequence[_Worker]
    ) -> None:
        try:
            if requests:
                _run_spies(workers, self._ending)
        finally:
            for request in requests:
                self._post(_make_answer(request, workers))

    def _answer_all(self, workers: Sequence[_Worker]) -> list[m.CollectStacks]:
        """Answer all requests, except those that want native frames. Return these.

        The next request starts a new collection: hang detection does not wait for native frames.
        """
        with self._lock:
            requests, self._requests = self._requests, []
        for request in requests:
            if not request.native:
                self._post(_make_answer(request, workers))
        return [request for request in requests if request.native]

    def _file_of(self, rank: int) -> tuple[int, int]:
        """Return the rank's file as a new descriptor, and its number in the worker; (-1, -1) if
        there is none.

        The descriptor is a copy, because the original may be closed meanwhile.
        """
        with suppress(KeyError, OSError):
            descriptor, number = self._files[rank]
            return os.dup(descriptor), number
        return -1, -1

    def clear(self) -> None:
        """Close the files of an attempt."""
        for descriptor, _ in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def close(self) -> None:
        """Abort the collection that is in progress."""
        self._ending.set()
        self.clear()


def _collect_stacks(
    workers: Sequence[_Worker], ending: threading.Event, cookie: str | None
) -> None:
    """Collect the stacks, and with ``cookie`` the process groups."""
    began = time.monotonic()
    spies = _PySpies()
    try:
        for worker in workers:
            worker.open()
            if not worker.is_waiting or worker.state in _NOT_ANSWERING:
                spies.add(worker)
        if cookie is not None:
            _read_groups(workers, cookie, until_s=began + DUMP_S)
        while (now := time.monotonic()) < began + ALL_S and not ending.is_set():
            waiting = [worker for worker in workers if worker.is_waiting]
            for worker in waiting:
                worker.read_if_complete(now)
                if worker.is_waiting and now >= began + DUMP_S:
                    worker.read()
                    if not worker.text:
                        spies.add(worker)
            if not spies.work() and not any(worker.is_waiting for worker in workers):
                break
            ending.wait(_STEP_S)
        _read_sources(workers)
    finally:
        spies.close()
        _close_all(workers)


def _run_spies(workers: Sequence[_Worker], ending: threading.Event) -> None:
    """Read the stacks with native frames of all workers that run."""
    until = time.monotonic() + NATIVE_S
    spies = _PySpies()
    try:
        for worker in workers:
            if worker.state:
                spies.add(worker, native=True)
        while spies.work() and time.monotonic() < until and not ending.is_set():
            ending.wait(_STEP_S)
    finally:
        spies.close()


def _read_groups(workers: Sequence[_Worker], cookie: str, *, until_s: float) -> None:
    """Read the process groups of the workers that can answer."""
    from distlaunch.core.agent.workers.flight_record import read_records

    pids = {each.rank: each.pid for each in workers if each.state not in ("", *_NOT_ANSWERING)}
    found = read_records(cookie, pids, until_s=until_s)
    for worker in workers:
        worker.process_groups = found.get(worker.rank, ())


def _read_sources(workers: Sequence[_Worker]) -> None:
    """Read the line of source at which each worker is. A hanging file system is not waited for."""
    places = [(worker, match) for worker in workers if (match := _INNERMOST.search(worker.text))]
    if not places:
        return
    found: dict[tuple[str, int], str] = {}

    def read() -> None:
        for _, match in places:
            place = match[1], int(match[2])
            if place not in found:
                found[place] = _line_of(*place)

    thread = threading.Thread(target=read, name="sources", daemon=True)
    with suppress(RuntimeError):  # no thread can be started
        thread.start()
        thread.join(_SOURCE_S)
    for worker, match in places:
        worker.source = found.get((match[1], int(match[2])), "")


def _line_of(path: str, number: int) -> str:
    with suppress(OSError, ValueError):
        if stat.S_ISREG(os.stat(path).st_mode):
            with open(path, "rb") as file:
                text = file.read(_SOURCE_BYTES)
            lines = text.split(b"\n", number)
            if number <= len(lines):
                return lines[number - 1][:_SOURCE_CHARS].decode("utf-8", "replace").strip()
    return ""


def _make_answer(request: m.CollectStacks, workers: Iterable[_Worker]) -> m.Stacks:
    stacks = (
        m.Stack(
            rank=worker.rank,
            pid=worker.pid,
            state=worker.state,
            text=worker.text,
            taken_s=worker.taken_s,
            cpu_s=worker.cpu_s,
            children_cpu_s=worker.children_cpu_s,
            holds_gpu=worker.holds_gpu,
            source=worker.source,
            native=worker.native,
            process_groups=worker.process_groups,
        )
        for worker in workers
    )
    return m.Stacks(attempt=request.attempt, serial=request.serial, stacks=tuple(stacks))


def _close_all(workers: Iterable[_Worker]) -> None:
    for worker in workers:
        worker.close()


class _PySpies:
    """Runs ``py-spy dump`` for workers that do not answer, or whose native frames are wanted.

    Errors of py-spy are ignored.
    """

    def __init__(self) -> None:
        self._program: str | None = None
        self._looked = False
        self._queue: list[tuple[_Worker, bool]] = []
        self._running: list[tuple[tuple[_Worker, bool], subprocess.Popen[bytes], int]] = []

    def add(self, worker: _Worker, *, native: bool = False) -> None:
        """Queue a worker, if py-spy is installed."""
        if not self._looked:
            import shutil

            self._looked = True
            self._program = shutil.which("py-spy")
        if self._program is not None and (worker, native) not in self._queue:
            self._queue.append((worker, native))

    def work(self) -> bool:
        """Start and finish processes where possible. Return whether any is left."""
        for entry in list(self._running):
            if entry[1].poll() is not None:
                self._running.remove(entry)
                self._end(*entry)
        while self._queue and len(self._running) < _SPIES:
            self._start(*self._queue.pop(0))
        return bool(self._running)

    def _start(self, worker: _Worker, native: bool) -> None:  # noqa: FBT001 - of a queue's entry
        import subprocess

        output = -1
        try:
            output = os.memfd_create("py-spy")
            arguments = [self._program or "", "dump", "--full-filenames", "--pid", str(worker.pid)]
            spy = subprocess.Popen(
                [*arguments, *(["--native"] if native else [])],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            if output >= 0:
                os.close(output)
            return
        self._running.append(((worker, native), spy, output))

    def _end(self, queued: tuple[_Worker, bool], spy: subprocess.Popen[bytes], output: int) -> None:
        """Read the output of a successful py-spy, main thread first."""
        import subprocess

        worker, native = queued
        with suppress(subprocess.TimeoutExpired):
            if spy.wait(timeout=_KILL_S) == 0:
                text = os.pread(output, worker.most, 0).decode("utf-8", "replace")
                if native:
                    worker.native = text
                worker.text = worker.text or text
        os.close(output)

    def close(self) -> None:
        for queued, spy, output in self._running:
            spy.kill()
            self._end(queued, spy, output)
        self._running.clear()
