"""The agent of one node: it starts, watches and stops the workers through the spawner, their parent
process.

The agent has no loop. The launcher (on its own machine) or ``RemoteAgent`` polls ``descriptors()``,
calls ``on_ready`` and ``tick`` (at ``deadline()``), and passes each message of the coordinator to
``handle``.
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
from typing import TYPE_CHECKING

from distlaunch.core.agent.node.attempt_setup import AttemptSetup, GpusReleased
from distlaunch.core.agent.node.ports import HeldPort
from distlaunch.core.agent.workers import process_tree
from distlaunch.core.agent.workers import worker_table as t
from distlaunch.core.agent.workers.channel import Channel
from distlaunch.core.agent.workers.exit_evidence import oom_kills, shared_memory_bytes
from distlaunch.core.agent.workers.output_pump import OutputSink, Posted, Pump, PumpFailed
from distlaunch.core.agent.workers.preload_log import PreloadReport
from distlaunch.core.agent.workers.process_tree import ChildReaper
from distlaunch.core.agent.workers.pseudo_terminal import PseudoTerminal
from distlaunch.core.agent.workers.shared_memory import SharedMemoryFiles, shared_memory_names
from distlaunch.core.agent.workers.spawner import SWEEP_S
from distlaunch.core.agent.workers.stacks import StackCollector
from distlaunch.core.agent.workers.streams import (
    NodeResources,
    WorkerStreams,
    bootstrap_environment,
)
from distlaunch.core.agent.workers.watcher import CLEANERS_S
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import assert_never, replace
from distlaunch.core.model.run_files import STDERR
from distlaunch.core.model.text import ended_how
from distlaunch.core.probe.process_limits import explain_refusal
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import spawner_messages as w

if TYPE_CHECKING:
    from distlaunch.core.agent.node.log_reader import LogReader
    from distlaunch.core.agent.node.usage import UsageReader

_PUMP_S = 2.0
_WATCHER_S = CLEANERS_S + 1.0
"""How long the watcher may take to kill the processes of a dead spawner. Then the agent kills
them."""
_POLL_S, _HURRIED_S = 0.1, 0.5
_TYPED_AHEAD_BYTES = 1 << 20
_Answer = m.Stacks | m.Usage | m.LogList | m.LogPart
"""Answers that threads have prepared."""


class Agent:
    """Carries out the coordinator's messages on this node, and reports events with ``send``."""

    def __init__(
        self,
        *,
        job_id: str,
        cookie: str,
        nofile: int,
        channel: Channel[w.FromSpawner],
        watcher: int,
        port: HeldPort | None,
        sink: OutputSink,
        send: Callable[[m.FromAgent], None],
        clock: Callable[[], float],
        resources: NodeResources | None = None,
    ) -> None:
        self.job_id = job_id
        self._cookie = cookie
        self._nofile = nofile
        self._channel = channel
        self._watcher = watcher
        self._spawner = 0
        """The spawner's pid, from its ``Running`` message. Its parent is the watcher, or this
        process if the watcher was killed."""
        self._send = send
        self._clock = clock
        self._table = t.WorkerTable()
        self._start: m.Start | None = None
        self._pids: list[int] = []
        self._resources = resources or NodeResources()
        self._attempt_setup = AttemptSetup(port=port, send=send, post=self._post)
        self._terminal: PseudoTerminal | None = None
        self._typed_ahead = bytearray()
        self._oom_before = 0
        self._posted: deque[Posted | GpusReleased | _Answer | m.AgentFailed] = deque()
        self._wake, self._wake_end = os.pipe()
        for descriptor in (self._wake, self._wake_end):
            os.set_blocking(descriptor, False)
        self._wake_lock = threading.Lock()
        self._pump = Pump(sink, self._post)
        self._stacks = StackCollector(self._post, cookie)
        self._usage: UsageReader | None = None
        self._log_reader: LogReader | None = None
        self._is_spawner_lost = False
        self._started: dict[int, int] = {}
        self._spawner_error: str | None = None
        self._reaper = ChildReaper(watcher)
        self._shared_memory = SharedMemoryFiles(owner=os.getuid())
        self._preload_report = PreloadReport(send, clock)
        self._is_init = os.getpid() == 1

    # --- for the loop that polls the agent

    def set_job_id(self, job_id: str) -> None:
        """Set the job id, which may be unknown when the agent starts."""
        self.job_id = job_id

    def start(self) -> None:
        """Start the output thread. Raises ConfigError if no thread can be started."""
        try:
            self._pump.start()
        except RuntimeError as exc:
            raise ConfigError("no thread can be started", hint=explain_refusal()) from exc

    def descriptors(self) -> dict[int, int]:
        """Return the poll events by descriptor."""
        wanted = {self._wake: select.POLLIN, **self._attempt_setup.descriptors()}
        if self._terminal is not None and self._terminal.has_unsent:
            wanted[self._terminal.fileno()] = select.POLLOUT
        if not self._is_spawner_lost:
            wanted[self._channel.fileno()] = select.POLLIN | (
                select.POLLOUT if self._channel.has_unsent else 0
            )
        return wanted

    def deadline(self) -> float | None:
        """Return when ``tick`` is due, on the agent's clock; None if no action is due."""
        times = [
            time
            for time in (self._table.deadline(), self._attempt_setup.deadline())
            if time is not None
        ]
        return min(times, default=None)

    def tick(self) -> None:
        """Run the actions of the worker table and of the attempt's setup that are due."""
        deadline = self._table.deadline()
        if deadline is not None and self._clock() >= deadline:
            self._step(t.DeadlineReached())
        self._attempt_setup.tick(self._clock())

    def on_ready(self) -> None:
        """Process all that is ready: messages of the spawner, events of threads, keys, new clients
        of the reserved port.

        As the first process of a container, also reap orphans.
        """
        with suppress(BlockingIOError):
            os.read(self._wake, 65536)
        if self._terminal is not None:
            self._terminal.flush()
        self._attempt_setup.on_ready()
        if self._is_init:
            self._reaper.reap_adopted()
        if not self._is_spawner_lost:
            self._wake_spawner()
            self._receive_from_spawner()
        while self._posted:
            event = self._posted.popleft()
            if isinstance(event, GpusReleased):
                self._attempt_setup.on_gpus_released(event, owner=self.job_id)
            elif isinstance(event, PumpFailed):
                self._send(m.AgentFailed(text=f"the output thread failed\n{event.text}"))
            elif isinstance(
                event, (m.Alive, m.Stacks, m.Usage, m.LogList, m.LogPart, m.AgentFailed)
            ):
                self._send(event)
            else:
                self._step(self._with_facts(event) if isinstance(event, t.Drained) else event)

    def _wake_spawner(self) -> None:
        """Resume the watcher and the spawner if they have been stopped.

        A stopped spawner would not notice that workers exit. SIGCHLD wakes the loop that calls this
        method.
        """
        for pid in filter(None, (self._watcher, self._spawner)):
            with suppress(ChildProcessError):
                if os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG) is not None:
                    os.kill(pid, signal.SIGCONT)

    def _receive_from_spawner(self) -> None:
        try:
            self._channel.flush()
            messages = self._channel.receive()
        except OSError:
            messages = None
        if messages is None:
            self._on_spawner_lost()
            return
        for message in messages:
            if isinstance(message, w.Running):
                self._spawner = message.pid
            elif isinstance(message, w.SignalReceived):
                self._send(m.SpawnerSignalled(signum=message.signum))
            elif isinstance(message, w.SpawnerFailed):
                self._spawner_error = message.text
            elif isinstance(
                message, (w.StillPreloading, w.ModuleLeftOut, w.Preloaded, w.PreloadFailed)
            ):
                self._preload_report.on_message(message)
            else:
                self._step(message)
        self._report_started()

    def _report_started(self) -> None:
        if self._started:
            started = m.Started(attempt=self._table.attempt, pids=self._started)
            self._pids += self._started.values()
            self._started = {}
            self._send(started)

    @property
    def is_broken(self) -> bool:
        """Whether the spawner has vanished. Then all workers were killed, and no
        ``AttemptEnded`` follows."""
        return self._is_spawner_lost

    def end_without_coordinator(self, attempt: int, *, grace_s: float, bound_s: float) -> None:
        """Stop the workers as on a request of the coordinator. ``AttemptEnded`` follows.

        If this method and ``close`` together take longer than ``bound_s``, the spawner stops the
        workers.
        """
        self._send_to_spawner(w.CoordinatorLost(bound_s=bound_s))
        self.handle(m.Stop(attempt=attempt, signum=signal.SIGTERM, grace_s=grace_s))

    def close(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """End the spawner, which kills all remaining processes, and release all resources.

        Takes at most about 8 s. When ``hurried`` returns True, the spawner has ``_HURRIED_S`` left.
        """
        if not self._is_spawner_lost:
            self._send_to_spawner(w.ExitSpawner())
            if not self._spawner_has_ended(time.monotonic() + SWEEP_S + 1.0, hurried):
                self._end_all()
        self._pump.finish()  # nothing is left, except after an error
        self._pump.stop()
        if self._pump.is_alive():
            self._pump.join(timeout=_PUMP_S)
        self._attempt_setup.release()
        self._close_terminal()
        self._stacks.close()
        if self._usage is not None:
            self._usage.close()
        self._preload_report.close()
        with self._wake_lock:  # a thread may still wait for GPU memory
            os.close(self._wake)
            os.close(self._wake_end)
            self._wake_end = -1

    def _spawner_has_ended(self, deadline: float, hurried: Callable[[], bool]) -> bool:
        """Read the spawner's last messages and reap it. Return whether it ended before
        ``deadline``."""
        poll = select.poll()
        while not self._is_spawner_lost and (left_s := deadline - time.monotonic()) > 0:
            if left_s > _HURRIED_S and hurried():
                deadline = time.monotonic() + _HURRIED_S
            try:
                self._channel.flush()
                poll.register(self._channel.fileno(), self.descriptors()[self._channel.fileno()])
                if poll.poll(min(left_s, _POLL_S) * 1000) and self._channel.receive() is None:
                    self._channel.close()
                    self._continue_spawner()
                    return self._reaper.await_child(bound_s=_WATCHER_S) is not None
            except OSError:
                break
        return self._is_spawner_lost

    # --- messages of the coordinator

    def handle(self, message: m.ToAgent) -> None:
        """Carry out a message of the coordinator."""
        match message:
            case m.Prepare():
                on_gpus = self._start is not None and self._start.uses_gpus
                self._attempt_setup.prepare(
                    message, owner=self.job_id, pids=self._pids if on_gpus else ()
                )
            case m.Input():
                self._on_input(message.data)
            case m.Resize():
                if self._terminal is not None:
                    self._terminal.resize(message.rows, message.columns)
            case m.Start():
                self._on_start(message)
            case m.Stop() | m.WaitForLeftovers() | m.ForwardSignal() | m.Pause():
                self._step(message)
            case m.CollectStacks():
                self._collect_stacks(message)
            case m.ReadUsage():
                self._read_usage(message)
            case m.ListLogs() | m.ReadLog():
                self._read_logs(message)
            case _:
                assert_never(message)

    def _on_start(self, message: m.Start) -> None:
        """Set up environment, shared memory and streams for an attempt, and start its workers."""
        self._start = message
        self._pids = []
        self._oom_before = oom_kills()
        try:
            if message.store:
                self._attempt_setup.serve_store(message.env.get("MASTER_ADDR", ""))
            else:
                self._attempt_setup.share(self._clock())
        except OSError as exc:
            self._send(
                m.AgentFailed(text=f"the store of the workers cannot be started: {exc.strerror}")
            )
            return
        bootstrap = bootstrap_environment(message, self._nofile, self._resources.boot)
        env = {**message.env, "DISTLAUNCH_COOKIE": self._cookie, **bootstrap}
        left = shared_memory_names(message, owner=os.getuid())
        log_dir, layout = self._resources.log_location(message)
        self._shared_memory.set_names(left)
        setup = w.Setup(
            env=env,
            cwd=message.cwd,
            cookie=self._cookie,
            nofile=self._nofile,
            signal_group=message.signal_group,
            job_id=self.job_id,
            orphan_grace_s=message.orphan_grace_s,
            temporary_dir=self._resources.temporary_dir,
            shared_memory=left,
            attempt=message.attempt,
            log_dir=log_dir,
            layout=layout,
        )
        self._send_to_spawner(setup)
        if message.preload and message.attempt == 0:
            order, output = self._preload_report.begin(message)
            self._send_to_spawner(order, (output,))
        self._pump.begin_attempt(
            2 * len(message.workers),
            attempt=message.attempt,
            watching=message.watch,
            output_period_s=message.output_period_s,
        )
        self._step(message)

    def _step(self, event: t.Event) -> None:
        """Pass an event to the worker table, and carry out its actions."""
        for action in self._table.step(event, self._clock()):
            match action:
                case t.Launch():
                    self._launch(action.spec)
                case t.Drain():
                    self._pump.drain(action.exit, action.error_file)
                case t.CloseOutputs():
                    self._pump.finish()
                case t.GiveUpSpawner():
                    self._on_spawner_lost()
                case (
                    w.Setup()
                    | w.Preload()
                    | w.Spawn()
                    | w.Signal()
                    | w.EndLeftovers()
                    | w.Sweep()
                    | w.CoordinatorLost()
                    | w.ExitSpawner()
                ):
                    self._send_to_spawner(action)
                case m.Started():
                    self._started.update(action.pids)
                case _:
                    self._report_started()
                    message = action
                    if isinstance(message, m.AttemptEnded):
                        message = replace(message, port_used=self._attempt_setup.was_port_used())
                        self._close_terminal()
                        self._shared_memory.set_names(())  # the spawner has removed the files
                        self._attempt_setup.release()
                        self._stacks.clear()
                    self._send(message)

    # --- actions

    def _launch(self, spec: m.WorkerSpec) -> None:
        start = self._start
        if start is None or self._is_spawner_lost:
            return
        try:
            if start.terminal:
                self._open_terminal(start)
            stdin = self._resources.stdin if spec.rank == start.stdin_rank else None
            streams = WorkerStreams(
                start, stdin=stdin, terminal=self._terminal, nofile=self._nofile
            )
        except OSError as exc:
            self._step(w.SpawnFailed(rank=spec.rank, step="pipe", errno=exc.errno or 0))
            return
        for number, descriptor in streams.outputs.items():
            self._pump.add(
                spec.rank, number, descriptor, tail_of=STDERR if start.terminal else number
            )
        self._pump.add_progress(spec.rank, streams.progress)
        if streams.stacks >= 0:
            self._stacks.add(spec.rank, streams.stacks, streams.numbers[-1])
        order = w.Spawn(
            rank=spec.rank,
            descriptors=streams.numbers,
            argv=spec.argv or start.argv,
            env=start.env_of(spec),
            cpus=spec.cpus,
            terminal=start.terminal,
            read_ends=tuple(streams.read_ends),
        )
        self._send_to_spawner(order, (*streams.theirs, *streams.read_ends.values()))

    def _open_terminal(self, start: m.Start) -> None:
        self._terminal = PseudoTerminal(start.rows, start.columns)
        self._terminal.type(bytes(self._typed_ahead))
        self._typed_ahead.clear()

    def _on_input(self, data: bytes) -> None:
        if self._terminal is None:
            self._typed_ahead += data[: _TYPED_AHEAD_BYTES - len(self._typed_ahead)]
            return
        is_halt = self._terminal.is_unhandled_halt(data, self._pids)
        self._terminal.type(data)
        for rank in self._table.running if is_halt else ():
            self._send(m.WorkerHalted(rank=rank))

    def _close_terminal(self) -> None:
        if self._terminal is not None:
            self._terminal.close()
            self._terminal = None

    def _send_to_spawner(self, message: w.ToSpawner, descriptors: tuple[int, ...] = ()) -> None:
        if self._is_spawner_lost:
            return
        try:
            self._channel.send(message, descriptors)
            if isinstance(message, (w.Signal, w.EndLeftovers, w.Sweep, w.ExitSpawner)):
                self._continue_spawner()
        except OSError:
            self._on_spawner_lost()

    def _continue_spawner(self) -> None:
        for pid in filter(None, (self._watcher, self._spawner)):
            process_tree.send(pid, signal.SIGCONT, parent_or_ancestor=os.getpid())

    def _post(self, event: Posted | GpusReleased | _Answer | m.AgentFailed) -> None:
        self._posted.append(event)
        with self._wake_lock, suppress(BlockingIOError):
            if self._wake_end >= 0:
                os.write(self._wake_end, b"\0")

    def _with_facts(self, drained: t.Drained) -> t.Drained:
        """Return the exit with what only this node knows about it."""
        code = drained.exit.returncode
        if not code:
            return drained
        kills = max(0, oom_kills() - self._oom_before) if code == -signal.SIGKILL else 0
        size = shared_memory_bytes()
        return t.Drained(exit=replace(drained.exit, oom_kills=kills, shared_memory_bytes=size))

    def _collect_stacks(self, request: m.CollectStacks) -> None:
        if request.attempt == self._table.attempt:
            pids = {rank: self._table.workers[rank].pid for rank in self._table.running}
            self._stacks.collect(request, {rank: pid for rank, pid in pids.items() if pid})

    def _read_usage(self, request: m.ReadUsage) -> None:
        if request.attempt != self._table.attempt or self._start is None:
            return
        if self._usage is None:
            from distlaunch.core.agent.node.usage import UsageReader

            self._usage = UsageReader(self._post, environ=os.environ)
        pids = {rank: self._table.workers[rank].pid for rank in self._table.running}
        running = {rank: pid for rank, pid in pids.items() if pid}
        self._usage.read(request, running, self._start)

    def _read_logs(self, request: m.ListLogs | m.ReadLog) -> None:
        if self._log_reader is None:
            from distlaunch.core.agent.node.log_reader import LogReader

            self._log_reader = LogReader(self._post)
        self._log_reader.read(request, self._resources.logs_to_read(request, self._start))

    def _on_spawner_lost(self) -> None:
        """Kill all workers: without their parent they cannot be supervised."""
        if self._is_spawner_lost:
            return
        self._is_spawner_lost = True
        self._channel.close()
        status = self._end_all()
        ended = "has vanished" if status is None else ended_how(os.waitstatus_to_exitcode(status))
        detail = f"\n{self._spawner_error}" if self._spawner_error else ""
        self._send(m.AgentFailed(text=f"the spawner (the parent of the workers) {ended}{detail}"))

    def _end_all(self) -> int | None:
        """Kill and reap all remaining processes in place of the spawner. Return the spawner's wait
        status, if known."""
        self._continue_spawner()
        status = self._reaper.await_child(bound_s=_WATCHER_S)
        killed = self._reaper.kill(bound_s=t.KILL_S)
        self._shared_memory.remove()
        return killed if status is None else status
