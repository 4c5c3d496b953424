"""The spawner, a small single-threaded process that is the parent of a node's workers.

It is forked from the agent before the agent has threads. It is a subreaper and every worker's
ancestor, so no descendant of a worker can escape it. When the agent ends in any way, the socket
between them closes, and the spawner ends all workers. If the spawner itself is killed, the kernel
kills the workers (PR_SET_PDEATHSIG), and their descendants become children of the agent, which is a
subreaper, too.

As the parent, the spawner learns of exits from waitpid, without polling or pidfds, and a signal to
an unreaped child cannot hit another process.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from distlaunch.core.agent.workers import process_tree, shared_memory, watcher
from distlaunch.core.agent.workers.channel import Channel
from distlaunch.core.agent.workers.orphan_output import OrphanOutput
from distlaunch.core.agent.workers.process_setup import (
    NO_WORKER,
    become_subreaper,
    close_all_but,
    die_with_parent,
    exec_worker,
    rename_process,
)
from distlaunch.core.agent.workers.warm_start import WarmStart
from distlaunch.core.agent.workers.worker_trees import WorkerTrees
from distlaunch.core.errors import EXIT_SOFTWARE
from distlaunch.core.model.fork import fork_from_helper, fork_helper, is_debugged
from distlaunch.core.model.record import assert_never
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import spawner_messages as w
from distlaunch.core.protocol.codec import Decoder

if TYPE_CHECKING:
    from distlaunch.core.agent.workers.pseudo_terminal import SavedTerminal

NAME = "dl-spawner"
"""Without distlaunch and python in name and title, ``pkill -9 -f`` of the launcher spares the
spawner."""
SWEEP_S = 5.0
"""How long a killed process (with much memory) may take to vanish before its pid is reported."""
SETTLE_S = 2.0
"""How long the preload server may take to finish its orders before a sweep."""
RESUME_S = 3.0
"""How long an agent may take to act after its connection has ended. Then the spawner acts."""
LOGS_S = 2.0
"""Longest time for writing the last output of orphaned workers to a slow disk."""
CHECK_INTERVAL_S = 0.02
"""Shortest time between two checks for leftovers."""
_SWEEP_STEP_S = 0.02
_LONGEST_POLL_S = 3600.0  # poll takes a C int of milliseconds
_WEDGED_STEP_S = 5.0
_TO_WORKERS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
)
_FOR_THE_JOB = frozenset(_TO_WORKERS) - {signal.SIGTSTP}
_ASKS_TO_END = (signal.SIGTERM, signal.SIGINT)


def start_spawner(
    *,
    job_id: str,
    orphan_grace_s: float,
    keep: Collection[int] = (),
    watched: int = -1,
    terminal: int = -1,
) -> tuple[Channel[w.FromSpawner], int]:
    """Fork the watcher, which forks the spawner. Return this process's end of the channel, and the
    watcher's pid.

    The watcher kills the processes of a spawner that was killed. Must be called before the first
    thread starts. If the limit of processes does not allow the watcher, the spawner is forked
    directly.

    ``orphan_grace_s`` is the time between TERM and KILL for workers if this process vanishes,
    unless ``Setup`` sets it. ``keep`` lists descriptors that the spawner needs. ``watched`` is a
    descriptor whose hang-up requires this process to act: if it is stopped then, the spawner
    resumes it; if it still does not act, the spawner ends the workers. ``terminal`` is the user's
    terminal, whose modes the spawner restores if this process vanishes.
    """
    become_subreaper()
    gc.freeze()  # a collection over existing objects would copy their memory in each process
    ours, theirs = socket.socketpair()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_WORKERS)  # until the child ignores them
    try:
        agent = os.getpid()
        pid = fork_helper()
        if pid == 0:
            _run_watcher(theirs, agent, job_id, orphan_grace_s, keep, watched, terminal)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return Channel(ours, Decoder(w.FROM_SPAWNER, w.NESTED_TYPES)), pid


def _run_watcher(
    end: socket.socket,
    agent: int,
    job_id: str,
    orphan_grace_s: float,
    keep: Collection[int],
    watched: int,
    terminal: int,
) -> NoReturn:
    """Run the watcher in this forked child, and the spawner in a child of the watcher.

    As much as possible is created before the second fork, so that both share the memory.
    """
    code = EXIT_SOFTWARE
    channel: Channel[w.ToSpawner] = Channel(end, Decoder(w.TO_SPAWNER, w.NESTED_TYPES))
    try:
        os.setsid()
        become_subreaper()
        watcher.name_process(job_id)
        saved = _save_terminal(terminal)
        kept = {end.fileno(), watched, *keep} | ({saved.descriptor} if saved is not None else set())
        _close_inherited(keep=kept)
        spawner = Spawner(
            channel, agent=agent, job_id=job_id, orphan_grace_s=orphan_grace_s, watched=watched
        )
        spawner.terminal = saved
        if pid := _fork_watched():
            watcher.watch(pid)
        rename_process(NAME, _process_title(job_id))
        spawner.run()
        code = 0
    except Exception:  # noqa: BLE001 - no caller could report it
        import traceback

        with suppress(OSError):
            channel.send(w.SpawnerFailed(text=traceback.format_exc()))
    finally:
        os._exit(code)  # never unwind into the launcher's frames


def _fork_watched() -> int:
    """Fork the spawner. Return its pid in the watcher, and 0 in the spawner.

    If no further process is allowed, this process becomes the spawner, without a watcher.
    """
    try:
        pid = fork_from_helper()
        if pid == 0:
            os.setsid()
            become_subreaper()
    except OSError:  # the limit of processes is reached
        pid = 0
    if pid == 0:
        die_with_parent(
            signal.SIGCONT
        )  # resumes the spawner, if somebody has stopped it, when its parent ends
    return pid


def _save_terminal(descriptor: int) -> SavedTerminal | None:
    if descriptor < 0:
        return None
    import termios

    from distlaunch.core.agent.workers.pseudo_terminal import SavedTerminal

    try:
        return SavedTerminal(descriptor)
    except (OSError, termios.error):  # the terminal is gone
        return None


def _process_title(job_id: str) -> str:
    return f"{NAME}: parent of the workers of job {job_id}" if job_id else NAME


def _ignore_signals() -> tuple[int, ...]:
    """Ignore or handle every signal except KILL. Return the signals that workers should ignore.

    Signals for the job wake the loop, which reports them. HUP is not reported if it was ignored at
    the start (nohup).
    """
    # A shell's ``&`` ignores INT and QUIT as well, but workers must react to them.
    ignored = tuple(
        number for number in (signal.SIGHUP,) if signal.getsignal(number) == signal.SIG_IGN
    )
    for number in (
        signal.SIGTSTP,
        signal.SIGPIPE,
        signal.SIGTTIN,
        signal.SIGTTOU,
        signal.SIGWINCH,
        *ignored,
    ):
        signal.signal(number, signal.SIG_IGN)
    for number in _FOR_THE_JOB - set(ignored):
        signal.signal(number, _ignore_signal)
    return ignored


def _ignore_signal(*_: object) -> None:
    """Do nothing: the signal wakes the loop, which gets its number."""


def _close_inherited(*, keep: Collection[int]) -> None:
    close_all_but(keep)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        if descriptor != null:
            os.dup2(null, descriptor)


class Spawner:
    """Starts, signals and reaps workers for the agent. Removes processes that workers leave
    behind."""

    def __init__(
        self,
        channel: Channel[w.ToSpawner],
        *,
        agent: int,
        job_id: str,
        orphan_grace_s: float,
        watched: int,
    ) -> None:
        self.terminal: SavedTerminal | None = None
        """The user's terminal, which is restored if the agent vanishes."""
        self._channel = channel
        self._watched = watched
        self._agent = agent
        # deadline for the agent to act after its connection has ended
        self._act_at: float | None = None
        self._ends = False
        self._job_id = job_id
        self._orphan_grace_s = orphan_grace_s
        self._setup = w.Setup(env={}, cwd="/", cookie="", nofile=1024, signal_group=False)
        self._pids: dict[int, int] = {}  # pid -> rank of workers that are not reaped
        self._temporary_dir_lock = -1
        self._stop_sent: set[int] = set()  # pids of workers that got a stop signal
        self._terminals: set[int] = set()  # ranks
        self._paused = False  # the agent has stopped all trees, so stopped workers are not reported
        self._failed: dict[
            int, tuple[str, int]
        ] = {}  # pid -> step and errno of children that failed before exec
        self._trees = WorkerTrees("")
        self._ends_leftovers = False
        self._sweeps_when_gone = False
        self._checked_at = 0.0
        self._check_at: float | None = None  # leftovers may have changed
        self._warm = WarmStart(
            fork=self._fork, cold=self._spawn, came_up=self._register, report=self._send_to_agent
        )
        self._shared_memory = shared_memory.SharedMemoryFiles(owner=os.getuid())
        self._output = OrphanOutput()
        self._failures, self._failure_end = os.pipe()
        self._wake, wake_end = os.pipe()
        for descriptor in (self._wake, wake_end, self._failures):
            os.set_blocking(descriptor, False)
        self._ignored = _ignore_signals()
        signal.pthread_sigmask(
            signal.SIG_SETMASK, ()
        )  # SIGCHLD is needed, even if the parent process has blocked it
        signal.signal(signal.SIGCHLD, _ignore_signal)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)

    def run(self) -> None:
        """Run until the agent ends the spawner or vanishes. No descendant is left then."""
        self._send_to_agent(w.Running(pid=os.getpid()))
        while True:
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            writing = select.POLLOUT if self._channel.has_unsent else 0
            poll.register(self._channel.fileno(), select.POLLIN | writing)
            if self._warm.fileno() >= 0:
                poll.register(self._warm.fileno(), select.POLLIN)
            if self._watched >= 0:
                poll.register(self._watched, select.POLLRDHUP)
            for descriptor in self._output.waits_for_writers:
                poll.register(descriptor, 0)
            for descriptor, _ in poll.poll(self._timeout_ms()):
                if descriptor == self._wake:
                    self._drain_wake()
                elif descriptor == self._watched:
                    self._resume_agent()
            if self._act_at is not None and time.monotonic() >= self._act_at:
                break
            self._warm.read()
            self._reap()
            self._output.close_finished()
            self._check_leftovers()
            try:
                self._channel.flush()
            except OSError:
                break
            messages = self._channel.receive()
            if messages is None:
                break
            for message in messages:
                self._act_at = self._act_at if self._ends else None  # the agent acts
                if isinstance(message, w.ExitSpawner):
                    self._warm.stop()
                    self._kill_all()
                    return
                self._handle(message)
        self._on_agent_lost()

    def _timeout_ms(self) -> float | None:
        times = [] if self._warm.timeout_s is None else [self._warm.timeout_s]
        times += [at - time.monotonic() for at in (self._act_at, self._check_at) if at is not None]
        times += [] if self._output.timeout_s is None else [self._output.timeout_s]
        return min(max(0.0, min(times)), _LONGEST_POLL_S) * 1000 if times else None

    def _resume_agent(self) -> None:
        """Resume the agent if it is stopped, so that it notices the end of its connection."""
        self._unwatch()
        self._act_at = time.monotonic() + RESUME_S
        parent = process_tree.stat_of(
            os.getppid()
        )  # the watcher, or the agent if the watcher was killed
        if os.getppid() == self._agent or (parent is not None and parent[1] == self._agent):
            with suppress(OSError):
                os.kill(self._agent, signal.SIGCONT)

    def _unwatch(self) -> None:
        if self._watched >= 0:
            os.close(self._watched)
            self._watched = -1

    def _handle(self, message: w.ToSpawner) -> None:
        match message:
            case w.Setup():
                self._on_setup(message)
            case w.Spawn():
                descriptors = [self._channel.received.popleft() for _ in message.descriptors]
                read_ends = [self._channel.received.popleft() for _ in message.read_ends]
                self._output.add(message.rank, message.read_ends, read_ends)
                if self._warm.can_fork(message):
                    self._warm.spawn(message, self._setup, descriptors)
                    return
                self._spawn(message, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
            case w.Preload():
                output = self._channel.received.popleft()
                if is_debugged():  # it follows executed programs, not forks of a server
                    self._send_to_agent(w.PreloadFailed(reason="a debugger follows the workers"))
                else:
                    self._warm.preload(message, self._setup, output)
                os.close(output)
            case w.Signal():
                self._warm.signal(message)
                self._send_signal(message)
            case w.EndLeftovers():
                self._ends_leftovers = True
                if message.asked:
                    self._trees.record_outside_signal()
                self._trees.ask_to_end(self._find_leftovers())
            case w.Sweep():
                self._warm.settle(bound_s=SETTLE_S)
                leftovers = [] if message.kill else self._find_leftovers()
                if leftovers:
                    self._sweeps_when_gone = True
                    self._send_to_agent(
                        w.LeftoversRemain(processes=self._trees.describe(leftovers))
                    )
                else:
                    self._sweep()
            case w.CoordinatorLost():
                self._unwatch()
                self._act_at = time.monotonic() + message.bound_s
                self._ends = True
            case w.ExitSpawner():
                pass  # handled by the loop
            case _:
                assert_never(message)

    def _on_setup(self, setup: w.Setup) -> None:
        self._setup = setup
        self._trees = WorkerTrees(setup.cookie)
        self._ends_leftovers = self._sweeps_when_gone = False
        self._shared_memory.set_names(setup.shared_memory)
        if setup.temporary_dir:
            self._lock_temporary_dir(setup.temporary_dir)
        if setup.orphan_grace_s is not None:
            self._orphan_grace_s = setup.orphan_grace_s
        if setup.job_id != self._job_id:
            self._job_id = setup.job_id
            rename_process(NAME, _process_title(setup.job_id))

    def _lock_temporary_dir(self, path: str) -> None:
        """Lock the agent's temporary directory until this process ends, even if the agent is
        killed.

        If the directory has been removed, the agent has created another one; lock that one.
        """
        if self._temporary_dir_lock >= 0:
            with suppress(OSError):
                if os.path.samestat(os.fstat(self._temporary_dir_lock), os.stat(path)):
                    return
            os.close(self._temporary_dir_lock)
        from distlaunch.core.agent.workers.temporary_directory import lock_folder

        self._temporary_dir_lock = lock_folder(path)

    def _send_to_agent(self, message: w.FromSpawner) -> None:
        with suppress(OSError):  # the agent is gone, which the loop notices when it reads
            self._channel.send(message)

    # --- starting

    def _spawn(self, order: w.Spawn, descriptors: Sequence[int]) -> None:
        """Start a worker by fork and exec."""
        try:
            pid = self._fork(order, descriptors)
        except OSError as exc:
            self._send_to_agent(w.SpawnFailed(rank=order.rank, step="fork", errno=exc.errno or 0))
            return
        self._register(order, pid)

    def _fork(self, order: w.Spawn, descriptors: Sequence[int]) -> int:
        """Fork a child that executes the order's program. Return its pid. Raise OSError."""
        spawner = os.getpid()
        before = signal.pthread_sigmask(
            signal.SIG_BLOCK, _TO_WORKERS
        )  # otherwise a signal that arrives before exec would be ignored
        try:
            pid = fork_from_helper()
            if pid == 0:
                exec_worker(
                    order, self._setup, descriptors, spawner, self._failure_end, self._ignored
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid

    def _register(self, order: w.Spawn, pid: int) -> None:
        """Record and report a worker that has been started."""
        self._pids[pid] = order.rank
        self._trees.add_worker(pid, order.rank)
        if order.terminal:
            self._terminals.add(order.rank)
        self._send_to_agent(w.Spawned(rank=order.rank, pid=pid))

    def _read_exec_failures(self) -> None:
        """Record the step and errno that children have reported before exec."""
        text = b""
        with suppress(BlockingIOError):
            while chunk := os.read(self._failures, 65536):
                text += chunk
        for line in text.decode().splitlines():
            pid, step, number = line.split()
            self._failed[int(pid)] = (step, int(number))

    # --- ends

    def _drain_wake(self) -> None:
        """Read the numbers of received signals. Report each signal for the job once."""
        numbers = b""
        with suppress(BlockingIOError):
            while woken := os.read(self._wake, 4096):
                numbers += woken
        for number in dict.fromkeys(numbers):
            if number in _FOR_THE_JOB:
                self._send_to_agent(w.SignalReceived(signum=number))

    def _reap(self) -> None:
        """Reap exited children and adopted orphans, and report the workers."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._schedule_check(worker_ended=pid in self._pids)
            if os.WIFSTOPPED(status):
                rank = self._pids.get(pid)
                if rank in self._terminals and not self._paused:
                    self._send_to_agent(w.Halted(rank=rank, signum=os.WSTOPSIG(status)))
            elif pid in self._pids:
                self._on_exit(pid, status)
            else:
                self._warm.on_reaped(pid, status)

    def _on_exit(self, pid: int, status: int) -> None:
        rank = self._pids.pop(pid)
        self._stop_sent.discard(pid)
        returncode = os.waitstatus_to_exitcode(status)
        if returncode == NO_WORKER:
            self._read_exec_failures()
        failed = self._failed.pop(pid, None)
        if failed is not None:
            self._send_to_agent(w.SpawnFailed(rank=rank, step=failed[0], errno=failed[1]))
        else:
            self._send_to_agent(WorkerExit(rank=rank, pid=pid, returncode=returncode))
            self._output.on_exit(rank)

    # --- processes left by exited workers

    def _find_leftovers(self) -> list[int]:
        return self._trees.find_leftovers(self._pids, helpers=(self._warm.pid,))

    def _schedule_check(self, *, worker_ended: bool) -> None:
        """Schedule a check for leftovers: a process that ends may have left others."""
        if self._ends_leftovers or self._sweeps_when_gone:
            self._check_at = 0.0 if worker_ended else self._checked_at + CHECK_INTERVAL_S

    def _check_leftovers(self) -> None:
        """Send TERM to new leftovers. Finish a requested sweep if no process remains."""
        now = time.monotonic()
        if self._check_at is None or now < self._check_at:
            return
        self._check_at, self._checked_at = None, now
        leftovers = self._find_leftovers()
        if self._ends_leftovers:
            self._trees.ask_to_end(leftovers)
        if self._sweeps_when_gone and not leftovers:
            self._sweep()

    def _sweep(self) -> None:
        """Kill all that is left of the workers, report it, and forget the attempt."""
        self._ends_leftovers = self._sweeps_when_gone = False
        left = self._kill_all(spared=self._warm.pid)
        for pid in left:
            self._pids.pop(pid, None)  # no longer part of an attempt, even if it ends some day
        self._output.close()
        self._send_to_agent(w.Swept(left=left, ended=self._trees.ended, killed=self._trees.killed))
        self._trees = WorkerTrees(self._setup.cookie)

    def _send_signal(self, order: w.Signal) -> None:
        """Send a signal to the processes, groups or trees of some workers.

        STOP and CONT for trees also reach all leftovers.
        """
        ranks = set(order.ranks)
        if order.scope == w.SCOPE_TREE:
            self._paused = order.signum == signal.SIGSTOP
            self._warm.pause(paused=self._paused)
        for pid, rank in list(self._pids.items()):
            if rank not in ranks or (
                order.caught_only and not process_tree.catches(pid, order.signum)
            ):
                continue
            if order.signum in _ASKS_TO_END and not order.caught_only:
                self._stop_sent.add(pid)
            if order.scope == w.SCOPE_PROCESS:
                process_tree.send(pid, order.signum)
            elif order.scope == w.SCOPE_GROUP:
                # a signal that only catching processes get is no stop signal
                if not order.caught_only:
                    self._trees.record_group_signal(pid, order.signum)
                process_tree.send_to_group(pid, order.signum)
            elif order.signum == signal.SIGKILL:
                self._trees.record_killed_with_worker(pid)
                process_tree.kill_each_tree([pid])
            else:
                process_tree.signal_tree(pid, order.signum, include_root=True)
        if order.scope == w.SCOPE_TREE and order.signum in (signal.SIGSTOP, signal.SIGCONT):
            for pid in process_tree.children_of(os.getpid()):
                if pid not in self._pids:
                    process_tree.signal_tree(pid, order.signum, include_root=True)

    def _kill_all(self, *, spared: int = 0, bound_s: float = SWEEP_S) -> tuple[int, ...]:
        """Kill all descendants until none remains, or for ``bound_s``. Return the remaining pids.

        Also remove the workers' shared memory. The child ``spared`` and its descendants are not
        killed.
        """
        began = time.monotonic()
        deadline = began + bound_s
        while True:
            self._reap()
            waits_for_cleaners = time.monotonic() < began + watcher.CLEANERS_S
            to_kill = [
                pid
                for pid in self._children_but(spared)
                if not (waits_for_cleaners and process_tree.is_cleaner(pid))
            ]
            self._trees.count_killed(to_kill)
            process_tree.kill_each_tree(to_kill)
            self._reap()
            left = self._children_but(spared)
            if not left or time.monotonic() > deadline:
                self._shared_memory.remove()
                return tuple(
                    pid for child in left for pid in (child, *process_tree.descendants_of(child))
                )
            select.select([self._wake], [], [], _SWEEP_STEP_S)
            self._drain_wake()

    @staticmethod
    def _children_but(spared: int) -> list[int]:
        return [pid for pid in process_tree.children_of(os.getpid()) if pid != spared]

    def _on_agent_lost(self) -> None:
        """End all processes after the agent has vanished: TERM, grace, KILL."""
        self._unwatch()  # otherwise the connection would stay open
        if self.terminal is not None:
            self.terminal.restore()
        self._output.start(self._setup)
        deadline = time.monotonic() + self._orphan_grace_s
        self._warm.stop()
        scope = w.SCOPE_GROUP if self._setup.signal_group else w.SCOPE_PROCESS
        # A worker that has had TERM from the agent may be saving a checkpoint. A second one could
        # end it.
        unasked = tuple(rank for pid, rank in self._pids.items() if pid not in self._stop_sent)
        ranks = tuple(self._pids.values())
        self._send_signal(
            w.Signal(ranks=unasked, signum=signal.SIGTERM, scope=scope, caught_only=False)
        )
        self._send_signal(
            w.Signal(ranks=ranks, signum=signal.SIGCONT, scope=w.SCOPE_TREE, caught_only=False)
        )
        self._ends_leftovers = True
        while (left_s := deadline - time.monotonic()) > 0:
            self._trees.ask_to_end(leftovers := self._find_leftovers())
            if not self._pids and not leftovers:
                break
            began = time.monotonic()
            select.select([self._wake], [], [], left_s)
            time.sleep(max(0.0, min(began + CHECK_INTERVAL_S, deadline) - time.monotonic()))
            self._drain_wake()
            self._reap()
        while self._kill_all():
            time.sleep(_WEDGED_STEP_S)
        self._output.finish(bound_s=LOGS_S)
        if self._setup.temporary_dir:
            from distlaunch.core.agent.workers.temporary_directory import remove_tree

            remove_tree(self._setup.temporary_dir)
