"""Layer core.agent: the agent of one node: the worker table, with its hands.

It owns no loop. Whoever hosts it (the launcher's own loop on one machine) polls ``descriptors()`` and calls
``on_ready``, ``tick`` at ``deadline()``, and ``handle`` for each message of the coordinator.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from distlaunch.core.agent import table as t
from distlaunch.core.agent import tree
from distlaunch.core.agent.channel import Channel
from distlaunch.core.agent.output import STDERR, Drained, OutputsClosed, Pump, Taker
from distlaunch.core.agent.ports import HeldPort, hold_port
from distlaunch.core.agent.spawner import SWEEP_S
from distlaunch.core.errors import ConfigError
from distlaunch.core.wire import messages as m
from distlaunch.core.wire import spawning as w

GPU_RELEASE_S = 30.0
"""How long the driver may take to give back the memory of processes that have ended."""
_LOCAL, _SPECIAL = 3, 6  # places in termios attributes
ERROR_FILE_BYTES = 256 << 10
_STDOUT = 1


class _GpusFree(NamedTuple):
    """The wait before an attempt is over; ``holders`` still had memory."""

    prepare: m.Prepare
    holders: tuple[int, ...]


class Agent:
    """Carries out what the coordinator says on this node and tells what happens."""

    def __init__(
        self,
        *,
        job_id: str,
        cookie: str,
        nofile: int,
        channel: Channel[w.FromSpawner],
        spawner_pid: int,
        taker: Taker,
        send: Callable[[m.FromAgent], None],
        clock: Callable[[], float],
    ) -> None:
        self._job_id = job_id
        self._cookie = cookie
        self._nofile = nofile
        self._channel = channel
        self._spawner_pid = spawner_pid
        self._send = send
        self._clock = clock
        self._table = t.WorkerTable()
        self._start: m.Start | None = None
        self._pids: list[int] = []  # of this attempt's workers
        self._port: HeldPort | None = None
        self._terminal: int | None = None  # our side of the worker's pseudo-terminal
        self._oom_before = 0
        self._posted: deque[Drained | OutputsClosed | _GpusFree] = deque()
        self._wake, self._wake_end = os.pipe()
        for descriptor in (self._wake, self._wake_end):
            os.set_blocking(descriptor, False)
        self._waking = threading.Lock()
        self._pump = Pump(taker, self._post)
        self._lost = False
        self._strangers = frozenset(tree.children_of(os.getpid())) - {spawner_pid}

    # --- hosting

    def start(self) -> None:
        """Start the output thread; the spawner exists already."""
        self._pump.start()

    def descriptors(self) -> dict[int, int]:
        """Give what to poll, with the events."""
        wanted = {self._wake: select.POLLIN}
        if not self._lost:
            wanted[self._channel.fileno()] = select.POLLIN | (select.POLLOUT if self._channel.has_unsent else 0)
        return wanted

    def deadline(self) -> float | None:
        """Give when ``tick`` is due, on the agent's clock."""
        return self._table.deadline()

    def tick(self) -> None:
        """Do what has come due."""
        deadline = self._table.deadline()
        if deadline is not None and self._clock() >= deadline:
            self._step(t.Tick())

    def on_ready(self) -> None:
        """Take what the spawner and the output thread have to say."""
        with suppress(BlockingIOError):
            os.read(self._wake, 65536)
        if not self._lost:
            self._take_from_spawner()
        while self._posted:
            event = self._posted.popleft()
            if isinstance(event, _GpusFree):
                held = ", ".join(map(str, event.holders))
                self._hold(event.prepare, warning=f"GPU memory is still held by ended pid {held}" if held else None)
            else:
                self._step(self._with_evidence(event) if isinstance(event, Drained) else event)

    def _take_from_spawner(self) -> None:
        try:
            self._channel.flush()
            messages = self._channel.receive()
        except OSError:
            messages = None
        if messages is None:
            self._spawner_lost()
            return
        for message in messages:
            self._step(message)

    def close(self) -> None:
        """Dismiss the spawner (whatever is left is killed), stop the thread, free everything. Bounded by 7 s or so."""
        if not self._lost:
            self._tell_spawner(w.Dismiss())
            if not self._spawner_has_ended(time.monotonic() + SWEEP_S + 1.0):
                self._kill_remains()
        self._pump.stop()
        self._pump.join(timeout=1)
        self._release_port()
        self._close_terminal()
        with self._waking:  # a wait for GPU memory may end later
            os.close(self._wake)
            os.close(self._wake_end)
            self._wake_end = -1

    def _spawner_has_ended(self, deadline: float) -> bool:
        """Read on until the spawner has closed its side, which is the last that it does, and reap it."""
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        while not self._lost and (left_s := deadline - time.monotonic()) > 0:
            try:
                self._channel.flush()
                if poll.poll(left_s * 1000) and self._channel.receive() is None:
                    os.waitpid(self._spawner_pid, 0)
                    self._channel.close()
                    return True
            except OSError:
                break
        return self._lost

    def _kill_remains(self) -> None:
        """Kill and reap what has fallen to us, the spawner too, but not children that we were started with.

        Those exist where a shell script ends in ``exec distlaunch`` and has a helper in the background.
        """
        deadline = time.monotonic() + t.KILL_S
        while time.monotonic() < deadline:
            _reap_ended_children()
            children = [pid for pid in tree.children_of(os.getpid()) if pid not in self._strangers]
            if not children:
                break
            tree.kill_each_tree(children)
            time.sleep(0.002)

    # --- the coordinator's words

    def handle(self, message: m.ToAgent) -> None:
        """Carry out one message."""
        match message:
            case m.Prepare():
                self._prepare(message)
            case m.Input():
                self._type(message.data)
            case m.Resize():
                self._resize(message.rows, message.columns)
            case m.Start():
                self._begin(message)
            case _:
                self._step(message)

    def _prepare(self, message: m.Prepare) -> None:
        """Hold the port; after an attempt on GPUs, first wait (in a thread) until its memory has been given back."""
        if self._start is None or not self._start.uses_gpus:
            self._hold(message, warning=None)
            return
        from distlaunch.core.probe.gpu_memory import await_release

        pids = frozenset(self._pids)

        def wait() -> None:
            self._post(_GpusFree(message, await_release(pids, bound_s=GPU_RELEASE_S, environ=os.environ)))

        threading.Thread(target=wait, name="gpu memory", daemon=True).start()

    def _hold(self, message: m.Prepare, *, warning: str | None) -> None:
        self._release_port()
        problem = hint = None
        try:
            if message.port is not None:
                self._port = hold_port(message.port, owner=self._job_id)
        except ConfigError as exc:
            problem, hint = exc.message, exc.hint
        number = self._port.number if self._port else None
        self._send(m.Prepared(attempt=message.attempt, port=number, problem=problem, hint=hint, warning=warning))

    def _begin(self, message: m.Start) -> None:
        self._start = message
        self._pids = []
        self._oom_before = _oom_kills()
        if self._port is not None:
            self._port.share()
        env = {**message.env, "DISTLAUNCH_COOKIE": self._cookie}
        self._tell_spawner(w.Setup(env=env, cwd=message.cwd, cookie=self._cookie, nofile=self._nofile))
        self._pump.expect(2 * len(message.workers))
        self._step(message)

    def _step(self, event: t.Event) -> None:
        for action in self._table.step(event, self._clock()):
            match action:
                case t.Launch():
                    self._launch(action.spec)
                case t.Drain():
                    self._pump.drain(action.rank)
                case t.CloseOutputs():
                    self._pump.finish()
                case w.Setup() | w.Spawn() | w.Signal() | w.Sweep() | w.Dismiss():
                    self._tell_spawner(action)
                case _:
                    if isinstance(action, m.Started):
                        self._pids += action.pids.values()
                    elif isinstance(action, m.Gone):
                        self._close_terminal()
                        self._release_port()
                    self._send(action)

    # --- hands

    def _launch(self, spec: m.WorkerSpec) -> None:
        start = self._start
        if start is None or self._lost:
            return
        try:
            descriptors = (
                self._open_terminal(start, spec.rank) if start.terminal else self._open_pipes(start, spec.rank)
            )
        except OSError as exc:
            self._step(w.SpawnFailed(rank=spec.rank, step="pipe", errno=exc.errno or 0))
            return
        order = w.Spawn(
            rank=spec.rank, argv=spec.argv or start.argv, env=spec.env, cpus=spec.cpus, terminal=start.terminal
        )
        self._tell_spawner(order, descriptors)

    def _open_pipes(self, start: m.Start, rank: int) -> tuple[int, int, int]:
        opened: list[int] = []
        try:
            opened.append(os.dup(0) if rank == start.stdin_rank else os.open(os.devnull, os.O_RDONLY))
            opened += os.pipe()
            opened += os.pipe()
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            raise
        stdin, out, out_end, err, err_end = opened
        self._pump.add(rank, _STDOUT, out, keeps_tail=False)
        self._pump.add(rank, STDERR, err, keeps_tail=True)
        return stdin, out_end, err_end

    def _open_terminal(self, start: m.Start, rank: int) -> tuple[int, int, int]:
        master, slave = os.openpty()
        self._terminal = os.dup(master)
        self._resize(start.rows, start.columns)
        self._pump.add(rank, _STDOUT, master, keeps_tail=True)
        return slave, os.dup(slave), os.dup(slave)

    def _type(self, data: bytes) -> None:
        if self._terminal is None:
            return
        halts = self._halts(self._terminal, data)
        with suppress(OSError):  # its input queue is full, or it is gone: as with any terminal, keys are lost
            os.write(self._terminal, data)
        for rank in self._table.running if halts else ():
            self._send(m.WorkerHalted(rank=rank))

    def _halts(self, terminal: int, data: bytes) -> bool:
        """Tell whether these keys hold a Ctrl-Z that the kernel will not act on.

        The worker leads its session, so its process group is orphaned, where SIGTSTP stops nothing by default (POSIX).
        One that catches it is left to itself, as are programs that have switched signals from keys off.
        """
        import termios

        try:
            modes = termios.tcgetattr(terminal)
        except (termios.error, OSError):
            return False
        key = modes[_SPECIAL][termios.VSUSP]
        typed = bool(modes[_LOCAL] & termios.ISIG) and key != b"\0" and key in data
        return typed and not any(tree.catches(pid, signal.SIGTSTP) for pid in self._pids)

    def _resize(self, rows: int, columns: int) -> None:
        if self._terminal is not None and rows and columns:
            import fcntl
            import struct
            import termios

            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _close_terminal(self) -> None:
        if self._terminal is not None:
            os.close(self._terminal)
            self._terminal = None

    def _release_port(self) -> None:
        if self._port is not None:
            self._port.release()
            self._port = None

    def _tell_spawner(self, message: w.ToSpawner, descriptors: tuple[int, ...] = ()) -> None:
        if self._lost:
            return
        try:
            self._channel.send(message, descriptors)
        except OSError:
            self._spawner_lost()

    def _post(self, event: Drained | OutputsClosed | _GpusFree) -> None:
        self._posted.append(event)
        with self._waking, suppress(BlockingIOError):
            if self._wake_end >= 0:
                os.write(self._wake_end, b"\0")

    def _with_evidence(self, drained: Drained) -> t.Evidence:
        worker = self._table.workers.get(drained.rank)
        path = worker.spec.error_file if worker else None
        killed = worker is not None and worker.returncode == -signal.SIGKILL
        return t.Evidence(
            drained=drained,
            error_file=_read_error_file(path) if path else None,
            oom_kills=max(0, _oom_kills() - self._oom_before) if killed else 0,
        )

    def _spawner_lost(self) -> None:
        """End everything: the parent of all workers has vanished, they fall to us and can no longer be supervised."""
        if self._lost:
            return
        self._lost = True
        self._channel.close()
        self._kill_remains()
        self._send(m.Fault(text="the spawner (parent of the workers) was killed"))


def _reap_ended_children() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _read_error_file(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return file.read(ERROR_FILE_BYTES).decode("utf-8", "replace")
    except OSError:
        return None


def _oom_kills() -> int:
    from distlaunch.core.probe.cpus import count_oom_kills

    return count_oom_kills() or 0
