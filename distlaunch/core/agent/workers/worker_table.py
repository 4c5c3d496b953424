"""The worker table of one node, a state machine without I/O: ``step(event, now) -> actions``.

An action is a message for the coordinator or the spawner, or an order for the agent: open, drain or
close a worker's streams.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Collection

from distlaunch.core.model.record import Record, assert_never, replace
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import spawner_messages as w

DRAIN_S = 1.0
"""Longest time for reading an exited worker's last output. Then the exit is reported without the
rest."""
SWEEP_S = 15.0
"""How long the spawner may take to send ``Swept``; its own limit is shorter."""
CLOSE_S = 30.0
"""Longest time for writing the last output to slow disks. Then the attempt ends without the
rest."""
KILL_S = 5.0
"""How long a killed worker may take to vanish before it counts as stuck in the kernel."""

NAMES_S = 0.5
"""How long after ``WaitForLeftovers`` leftover processes are reported, if they still run."""
YOUNG_S = 0.3
AGAIN_S = 1.0
"""Time after which a worker younger than ``YOUNG_S`` gets TERM if INT has not ended it: Python may
swallow a KeyboardInterrupt during an import."""

_EXEC_EXIT = {
    2: 127,
    20: 127,
}  # ENOENT and ENOTDIR mean not found, as in shells; all others are 126


class Drained(Record):
    """All output of an exited worker has been read, and added to ``exit``."""

    exit: WorkerExit


class OutputsClosed(Record):
    """All streams are closed."""


class Launch(Record):
    """Open a worker's streams and start it."""

    spec: m.WorkerSpec


class Drain(Record):
    """Read an exited worker's output and error file. Answered by ``Drained``."""

    exit: WorkerExit
    error_file: str | None = None


class CloseOutputs(Record):
    """Read all remaining output and close the streams. Answered by ``OutputsClosed``."""


class GiveUpSpawner(Record):
    """Kill the spawner and all its descendants: it does not answer (stopped by a debugger, or
    stuck)."""


class DeadlineReached(Record):
    """A deadline has passed."""


Event = m.ToAgent | w.FromSpawner | Drained | OutputsClosed | DeadlineReached
Action = Launch | Drain | CloseOutputs | GiveUpSpawner | m.FromAgent | w.ToSpawner


class _Worker:
    def __init__(self, spec: m.WorkerSpec, started: float) -> None:
        self.spec = spec
        self.started = started
        self.pid = 0
        self.exit: WorkerExit | None = None
        self.told_to_stop = False
        self.reported = False


class WorkerTable:
    """The workers of one attempt on one node, from ``Start`` to ``AttemptEnded``.

    Methods return the actions that follow: orders to the agent and the spawner, and messages to the
    coordinator.
    """

    def __init__(self) -> None:
        self.attempt = -1
        self.workers: dict[int, _Worker] = {}
        self.argv0 = ""
        self.signal_scope = w.SCOPE_PROCESS
        self.kill_at: float | None = None
        self.wedged_at: float | None = None
        self.again_at: float | None = None
        self.sweep_at: float | None = None
        self.close_at: float | None = None
        self.linger_until: float | None = None
        """How long processes left by workers may run on."""
        self.names_at: float | None = None
        """When to report these processes."""
        self._linger_grace_s = 0.0
        self._ends_leftovers = False
        self._kills = False
        """All workers were killed. Processes that they leave are then killed at once."""
        self._young: set[int] = set()
        self.sweeping = False
        self._swept = w.Swept(left=())
        self._unreported = 0
        self._draining: dict[
            int, float
        ] = {}  # exited ranks that are not reported yet -> since when, in order

    @property
    def running(self) -> list[int]:
        """The ranks whose process has not exited, as far as this process knows."""
        return [rank for rank, worker in self.workers.items() if worker.exit is None]

    def deadline(self) -> float | None:
        """Return when ``DeadlineReached`` is due; None if it is not."""
        times = [
            time
            for time in (
                self.kill_at,
                self.wedged_at,
                self.again_at,
                self.sweep_at,
                self.close_at,
                self.linger_until,
                self.names_at,
            )
            if time is not None
        ]
        times += [ended + DRAIN_S for ended in itertools.islice(self._draining.values(), 1)]
        return min(times, default=None)

    def step(self, event: Event, now: float) -> list[Action]:
        """Process an event of the time ``now`` (seconds on any monotonic clock). Return the
        actions."""
        match event:
            case m.Start():
                return self._on_start(event, now)
            case m.Stop():
                return self._on_stop(event, now)
            case m.WaitForLeftovers():
                return self._on_wait_for_leftovers(event, now)
            case m.ForwardSignal():
                return self._signal_running(event.signum, self.signal_scope, caught_only=True)
            case m.Pause():
                return self._on_pause(paused=event.paused)
            case w.Spawned():
                return self._on_spawned(event, now)
            case w.SpawnFailed():
                return self._on_spawn_failed(event, now)
            case WorkerExit():
                worker = self.workers.get(event.rank)
                if worker is None or worker.pid != event.pid:
                    return []  # of an earlier attempt, stuck until now
                return self._on_exit(event, now)
            case w.Halted():
                return [m.WorkerHalted(rank=event.rank)]
            case Drained():
                return self._report_exit(event.exit, now)
            case w.LeftoversRemain():
                return self._on_leftovers_remain(event)
            case w.Swept():
                return self._on_swept(event, now)
            case OutputsClosed():
                return self._finish()
            case DeadlineReached():
                return self._on_tick(now)
            case (
                m.Prepare()
                | m.CollectStacks()
                | m.ReadUsage()
                | m.ListLogs()
                | m.ReadLog()
                | m.Input()
                | m.Resize()
                | w.Running()
                | w.SignalReceived()
                | w.SpawnerFailed()
                | w.StillPreloading()
                | w.ModuleLeftOut()
                | w.Preloaded()
                | w.PreloadFailed()
            ):
                return []  # handled by the agent
            case _:
                assert_never(event)

    def _on_start(self, event: m.Start, now: float) -> list[Action]:
        self.attempt = event.attempt
        self.argv0 = event.argv[0] if event.argv else ""
        self.signal_scope = w.SCOPE_GROUP if event.signal_group else w.SCOPE_PROCESS
        self.workers = {spec.rank: _Worker(spec, started=now) for spec in event.workers}
        self._unreported = len(self.workers)
        self._draining = {}
        self.kill_at = self.wedged_at = self.again_at = self.sweep_at = self.close_at = None
        self.linger_until = self.names_at = None
        self._ends_leftovers = self._kills = False
        self.sweeping = not event.workers
        self._swept = w.Swept(left=())
        return [Launch(spec=spec) for spec in event.workers] or [w.Sweep()]

    def _on_spawned(self, event: w.Spawned, now: float) -> list[Action]:
        worker = self.workers[event.rank]
        worker.pid, worker.started = event.pid, now
        return [m.Started(attempt=self.attempt, pids={event.rank: event.pid})]

    def _on_spawn_failed(self, event: w.SpawnFailed, now: float) -> list[Action]:
        worker = self.workers[event.rank]
        reason = os.strerror(event.errno)
        program = (worker.spec.argv or (self.argv0,))[0]
        what = {
            "exec": f"run {program}",
            "interpreter": f"run {program}, as what its #! line names is missing",
            "chdir": "enter the working directory",
        }
        text = (
            "distlaunch: cannot "
            f"{what.get(event.step, 'start the worker (' + event.step + ')')}: {reason}\n"
        )
        ended = WorkerExit(
            rank=event.rank,
            pid=worker.pid,
            returncode=_EXEC_EXIT.get(event.errno, 126),
            stderr_tail=text.encode("utf-8", "surrogateescape"),
        )
        return self._on_exit(ended, now)

    def _on_exit(self, ended: WorkerExit, now: float) -> list[Action]:
        worker = self.workers[ended.rank]
        if worker.exit is not None:
            return []
        worker.exit = replace(
            ended,
            attempt=self.attempt,
            uptime_s=now - worker.started,
            ended=now,
            told_to_stop=worker.told_to_stop,
        )
        self._draining[ended.rank] = now
        return [Drain(exit=worker.exit, error_file=worker.spec.error_file)]

    def _report_exit(self, ended: WorkerExit, now: float) -> list[Action]:
        """Report an exit with its last output, once. After the last one, begin the end of the
        attempt."""
        worker = self.workers.get(ended.rank)
        if worker is None or worker.exit is None or worker.reported:
            return []
        if ended.attempt != self.attempt:
            return []  # of an attempt whose last output was read late
        worker.reported = True
        self._unreported -= 1
        del self._draining[ended.rank]
        actions: list[Action] = [ended]
        if not self._unreported and not self.sweeping:
            self.sweeping = True
            self.wedged_at = self.again_at = None
            actions += self._end_attempt(now)
        return actions

    # --- processes left by workers

    def _end_attempt(self, now: float) -> list[Action]:
        """Ask the spawner to report when no process of the workers remains; after a kill, to kill
        those that remain."""
        self.sweep_at = now + SWEEP_S
        if self._kills:
            self.kill_at = self.linger_until = self.names_at = None
        return [w.Sweep(kill=self._kills)]

    def _on_wait_for_leftovers(self, event: m.WaitForLeftovers, now: float) -> list[Action]:
        if event.attempt != self.attempt or not self._waits_for_leftovers or self._ends_leftovers:
            return []
        self.linger_until = now + event.linger_s
        self.names_at = now + NAMES_S
        self._linger_grace_s = event.grace_s
        return []

    @property
    def _waits_for_leftovers(self) -> bool:
        return self.sweeping and bool(self.workers) and self.close_at is None and not self._kills

    def _on_leftovers_remain(self, event: w.LeftoversRemain) -> list[Action]:
        if not self._waits_for_leftovers:
            return []
        self.sweep_at = None  # the spawner has answered
        if self.linger_until is None or self.names_at is not None:
            return []
        return [m.LeftoversRunning(attempt=self.attempt, processes=event.processes)]

    def _end_leftovers(self, *, asked: bool = False) -> list[Action]:
        """Ask the spawner once to end leftover processes. ``asked``: they have got the signal
        already."""
        self.linger_until = self.names_at = None
        if self._ends_leftovers:
            return []
        self._ends_leftovers = True
        return [w.EndLeftovers(asked=asked)]

    def _on_swept(self, swept: w.Swept, now: float) -> list[Action]:
        if self.sweep_at is None and not self.sweeping:
            return []
        self._swept = swept
        self.sweep_at = self.kill_at = self.linger_until = self.names_at = None
        self.close_at = now + CLOSE_S
        return [CloseOutputs()]

    def _finish(self) -> list[Action]:
        """Return ``AttemptEnded``, and forget the workers."""
        if not self.sweeping:
            return []
        self.workers.clear()
        self.sweeping = False
        self.sweep_at = self.close_at = None
        swept = self._swept
        return [
            m.AttemptEnded(
                attempt=self.attempt, left=swept.left, ended=swept.ended, killed=swept.killed
            )
        ]

    # --- stopping

    def _on_stop(self, event: m.Stop, now: float) -> list[Action]:
        """Ask the running workers to end, and set the time for KILL; without a grace, kill them
        now.

        A later order can only make the grace shorter.
        """
        if event.attempt != self.attempt or not self.workers:
            return []
        if self.close_at is not None:
            return self._finish() if event.grace_s <= 0 else []
        if self._kills and not self.running:
            return []
        for rank in self.running:
            self.workers[rank].told_to_stop = True
        if event.grace_s <= 0:
            return self._kill(now)
        kill_at = now + event.grace_s
        self.kill_at = kill_at if self.kill_at is None else min(kill_at, self.kill_at)
        if event.signum == signal.SIGINT and self.again_at is None:
            self._young = {
                rank for rank in self.running if now - self.workers[rank].started < YOUNG_S
            }
            self.again_at = now + AGAIN_S if self._young else None
        return [
            *(self._signal_running(event.signum, self.signal_scope) if event.signum else []),
            *self._signal_running(
                signal.SIGCONT, w.SCOPE_PROCESS
            ),  # a stopped worker must be able to react
            *self._end_leftovers(asked=not event.signum),
        ]

    def _kill(self, now: float) -> list[Action]:
        """Kill the trees of running workers, then the processes that other workers have left."""
        self.kill_at = None
        self._kills = True
        if self.running:
            self.wedged_at = now + KILL_S
            return self._signal_running(signal.SIGKILL, w.SCOPE_TREE)
        return (
            self._end_attempt(now) if self.sweeping else []
        )  # otherwise after the last worker has been reported

    def _on_pause(self, *, paused: bool) -> list[Action]:
        signum = signal.SIGSTOP if paused else signal.SIGCONT
        if self.sweeping and self.workers:  # only processes left by workers are running
            return [w.Signal(ranks=(), signum=int(signum), scope=w.SCOPE_TREE, caught_only=False)]
        return self._signal_running(signum, w.SCOPE_TREE)

    def _signal_running(
        self,
        signum: int,
        scope: str,
        *,
        caught_only: bool = False,
        only: Collection[int] | None = None,
    ) -> list[Action]:
        ranks = tuple(rank for rank in self.running if only is None or rank in only)
        return (
            [w.Signal(ranks=ranks, signum=int(signum), scope=scope, caught_only=caught_only)]
            if ranks
            else []
        )

    def _on_tick(self, now: float) -> list[Action]:
        """Carry out what is due: TERM again, KILL, late exits, leftovers, giving up the spawner."""
        actions: list[Action] = []
        if self.again_at is not None and now >= self.again_at:
            self.again_at = None
            actions += self._signal_running(signal.SIGTERM, self.signal_scope, only=self._young)
        if self.kill_at is not None and now >= self.kill_at:
            actions += self._kill(now)
        if self.wedged_at is not None and now >= self.wedged_at:
            self.wedged_at = None
            for rank in self.running:
                wedged = WorkerExit(
                    rank=rank, pid=self.workers[rank].pid, returncode=-signal.SIGKILL
                )
                actions += self._on_exit(wedged, now)
        for ended in self._overdue_exits(now):
            actions += self._report_exit(ended, now)
        if self.names_at is not None and now >= self.names_at:
            self.names_at = None
            actions.append(w.Sweep())  # answered with their names, unless they have ended
        if self.linger_until is not None and now >= self.linger_until:
            actions += self._end_leftovers()
            self.kill_at = now + self._linger_grace_s
            if self._linger_grace_s <= 0:
                actions += self._kill(now)
        if self.sweep_at is not None and now >= self.sweep_at:
            self.sweep_at = None
            actions.append(GiveUpSpawner())
        if self.close_at is not None and now >= self.close_at:
            actions += self._finish()
        return actions

    def _overdue_exits(self, now: float) -> list[WorkerExit]:
        return [
            ended
            for rank, since in self._draining.items()
            if now >= since + DRAIN_S and (ended := self.workers[rank].exit) is not None
        ]
