"""Where a node's workers stand: their process states, processor time and threads' stacks.

Our bootstrap has armed faulthandler in a worker on ``SIGNAL``, to write into a file in memory that
we share with it. A worker that has no such handler is never sent the signal, which would kill it,
nor is one that has another file there by now; for those, and for one that does not answer (stopped,
or stuck where no signal is handled), py-spy is asked if there is one. All of it is bounded, in a
thread.
"""

from __future__ import annotations

import os
import signal
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
"""As in ``boot/sitecustomize.py``."""
TEXT_BYTES = 64 << 10
"""The most that is taken of one worker."""
_ANSWER_BYTES = 8 << 20
"""The most of all; JSON makes six bytes of an odd one, and a message has 64 MiB at most."""
DUMP_S = 1.5
"""How long a worker may take to write its stacks."""
ALL_S = 2.5
"""How long all of it may take, py-spy included."""
_STEP_S = 0.02
_STILL_S = 0.1
"""A dump that has not grown for so long is whole: faulthandler writes it in many pieces, without an
end mark."""
_SPIES = 4
"""So many py-spy at once: each takes a processor, and the workers may need theirs."""
_KILL_S = 0.2
_NOT_ANSWERING = ("T", "t", "D")


class _Worker:
    def __init__(self, rank: int, pid: int, descriptor: int, number: int, most: int) -> None:
        self.rank = rank
        self.pid = pid
        self.descriptor = descriptor
        self.number = number
        """Where it has the same file."""
        self.most = most
        """So many bytes are taken."""
        self.state = ""
        self.before = self.size = 0
        self.grew_at = 0.0
        self.text = ""
        self.taken_s = self.cpu_s = self.children_cpu_s = 0.0
        self.holds_gpu = False

    def open(self) -> None:
        """See how it stands, and ask it if it is armed."""
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
        """Return whether it would write into our file: it may have closed what it did not know, and
        opened its own."""
        try:
            return os.path.samestat(
                os.stat(f"/proc/{self.pid}/fd/{self.number}"), os.fstat(self.descriptor)
            )
        except OSError:
            return False

    @property
    def asked(self) -> bool:
        """Return whether it may still answer."""
        return self.descriptor >= 0

    def look(self, now: float) -> None:
        """Take its answer, if that is whole."""
        size = os.fstat(self.descriptor).st_size
        if size != self.size:
            self.size, self.grew_at = size, now
        elif size > self.before and now - self.grew_at >= _STILL_S:
            self.take()

    def take(self) -> None:
        """Take what has come; of too much the end, where faulthandler has the main thread."""
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
    """Holds the stack files of an attempt's workers, and takes all stacks when asked."""

    def __init__(self, post: Callable[[m.Stacks], None]) -> None:
        self._post = post
        self._files: dict[int, tuple[int, int]] = {}  # rank -> descriptor, its number in the worker
        self._ending = threading.Event()

    def add(self, rank: int, descriptor: int, number: int) -> None:
        """Keep the file that a worker shows its stacks in (as ``number`` there), and close it in
        the end."""
        self._files[rank] = descriptor, number

    def collect(self, question: m.CollectStacks, pids: Mapping[int, int]) -> None:
        """Have ``Stacks`` posted for these workers (rank -> pid), from another thread."""
        most = min(TEXT_BYTES, _ANSWER_BYTES // max(1, len(pids)))
        workers = [_Worker(rank, pid, *self._file_of(rank), most) for rank, pid in pids.items()]
        arguments = (question, workers, self._post, self._ending)
        try:
            threading.Thread(target=_collect, args=arguments, name="stacks", daemon=True).start()
        except RuntimeError:  # the user may start no more threads
            _close(workers)
            self._post(_answer(question, workers))

    def _file_of(self, rank: int) -> tuple[int, int]:
        """Return a descriptor for the thread: ours may be closed while it works."""
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
        """End whatever is under way."""
        self._ending.set()
        self.clear()


def _collect(
    question: m.CollectStacks,
    workers: Sequence[_Worker],
    post: Callable[[m.Stacks], None],
    ending: threading.Event,
) -> None:
    began = time.monotonic()
    spies = _Spies()
    try:
        for worker in workers:
            worker.open()
            if not worker.asked or worker.state in _NOT_ANSWERING:
                spies.add(worker)
        while (now := time.monotonic()) < began + ALL_S and not ending.is_set():
            waiting = [worker for worker in workers if worker.asked]
            for worker in waiting:
                worker.look(now)
                if worker.asked and now >= began + DUMP_S:
                    worker.take()
                    if not worker.text:
                        spies.add(worker)
            if not spies.work() and not any(worker.asked for worker in workers):
                break
            ending.wait(_STEP_S)
    finally:
        spies.close()
        _close(workers)
        post(_answer(question, workers))


def _answer(question: m.CollectStacks, workers: Iterable[_Worker]) -> m.Stacks:
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
        )
        for worker in workers
    )
    return m.Stacks(attempt=question.attempt, serial=question.serial, stacks=tuple(stacks))


def _close(workers: Iterable[_Worker]) -> None:
    for worker in workers:
        worker.close()


class _Spies:
    """Runs ``py-spy dump`` for workers that do not tell themselves; what goes wrong there is
    nobody's news."""

    def __init__(self) -> None:
        self._program: str | None = None
        self._looked = False
        self._queue: list[_Worker] = []
        self._running: list[tuple[_Worker, subprocess.Popen[bytes], int]] = []

    def add(self, worker: _Worker) -> None:
        """Ask for this worker's stacks, if there is somebody to ask."""
        if not self._looked:
            import shutil

            self._looked = True
            self._program = shutil.which("py-spy")
        if self._program is not None and worker not in self._queue:
            self._queue.append(worker)

    def work(self) -> bool:
        """Start and end what can be; tell whether anything is left."""
        for entry in list(self._running):
            if entry[1].poll() is not None:
                self._running.remove(entry)
                self._end(*entry)
        while self._queue and len(self._running) < _SPIES:
            self._start(self._queue.pop(0))
        return bool(self._running)

    def _start(self, worker: _Worker) -> None:
        import subprocess

        output = -1
        try:
            output = os.memfd_create("py-spy")
            words = [self._program or "", "dump", "--full-filenames", "--pid", str(worker.pid)]
            spy = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            if output >= 0:
                os.close(output)
            return
        self._running.append((worker, spy, output))

    def _end(self, worker: _Worker, spy: subprocess.Popen[bytes], output: int) -> None:
        """Take what it has written, if it went well: it has the main thread first."""
        import subprocess

        with suppress(subprocess.TimeoutExpired):
            if spy.wait(timeout=_KILL_S) == 0 and not worker.text:
                worker.text = os.pread(output, worker.most, 0).decode("utf-8", "replace")
        os.close(output)

    def close(self) -> None:
        """End those that have not."""
        for worker, spy, output in self._running:
            spy.kill()
            self._end(worker, spy, output)
        self._running.clear()
