"""The spawner, a small single-threaded process that is the parent of a node's workers.

It is forked from the agent before the agent has threads, and is both starter and guard. Being a
subreaper and every worker's ancestor, no descendant can leave it: when the agent ends in any way,
the socket between them closes and the spawner ends everything. When the spawner itself is killed,
workers get KILL from the kernel (PR_SET_PDEATHSIG) and their descendants fall to the agent, a
subreaper too. As parent it learns of exits by waitpid alone: no polling, no pidfd needed, and a
signal to a child that it has not reaped cannot hit a stranger.
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
    become,
    become_subreaper,
    close_all_but,
    die_with_parent,
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
"""Neither name nor title says distlaunch or python: ``pkill -9 -f`` of the launcher must not hit
its guard as well."""
SWEEP_S = 5.0
"""How long KILL may take to show (exit of a process with much memory) before its pid is reported as
left."""
SETTLE_S = 2.0
"""How long the warm server may take to finish what it was told before a sweep."""
ROUSE_S = 3.0
"""How long an agent may take to act at the end of its channel before the spawner does in its
place."""
LOGS_S = 2.0
"""How long the last output of orphaned workers may take to be written, on a disk that is slow."""
LOOK_AGAIN_S = 0.02
"""Processes that end and start all the time are looked at no more often than this."""
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
    """Fork the watcher, which forks the spawner. Return our end of the channel, and the watcher's
    pid.

    Call before the first thread is started. If there is no process left for a watcher, the spawner
    does without.

    ``orphan_grace_s``: how long workers may take to end by TERM if this process vanishes, unless a
    ``Setup`` says it. ``keep``: descriptors that it needs as well. ``watched``: one at whose
    hang-up this process should act: the spawner wakes it, if somebody has stopped it, and acts in
    its place if that is in vain. ``terminal``: the user's, whose modes this process will change:
    the spawner restores them if this process vanishes.
    """
    become_subreaper()
    gc.freeze()  # a collection that looked at what is there now would have each process copy it
    ours, theirs = socket.socketpair()
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, _TO_WORKERS
    )  # until the child has made itself deaf to them
    try:
        agent = os.getpid()
        pid = fork_helper()
        if pid == 0:
            _run(theirs, agent, job_id, orphan_grace_s, keep, watched, terminal)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return Channel(ours, Decoder(w.FROM_SPAWNER, w.PARTS)), pid


def _run(
    end: socket.socket,
    agent: int,
    job_id: str,
    orphan_grace_s: float,
    keep: Collection[int],
    watched: int,
    terminal: int,
) -> NoReturn:
    """Be the watcher in this forked child, and the spawner in a child of that.

    All that can be made before the second fork is: so both share it, and the watcher has little
    memory of its own.
    """
    code = EXIT_SOFTWARE
    channel: Channel[w.ToSpawner] = Channel(end, Decoder(w.TO_SPAWNER, w.PARTS))
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
        rename_process(NAME, _title(job_id))
        spawner.run()
        code = 0
    except Exception:  # noqa: BLE001 - nobody above could tell of it
        import traceback

        with suppress(OSError):
            channel.send(w.SpawnerFailed(text=traceback.format_exc()))
    finally:
        os._exit(code)  # never unwind into the launcher's frames


def _fork_watched() -> int:
    """Fork the spawner; return its pid in the watcher, and 0 in itself. If no process is left, it
    is not watched."""
    try:
        pid = fork_from_helper()
        if pid == 0:
            os.setsid()
            become_subreaper()
    except OSError:  # the user may start no more
        pid = 0
    if pid == 0:
        die_with_parent(
            signal.SIGCONT
        )  # if somebody has stopped the spawner, it must go on when its parent ends
    return pid


def _save_terminal(descriptor: int) -> SavedTerminal | None:
    if descriptor < 0:
        return None
    import termios

    from distlaunch.core.agent.workers.pseudo_terminal import SavedTerminal

    try:
        return SavedTerminal(descriptor)
    except (OSError, termios.error):  # it has gone away
        return None


def _title(job_id: str) -> str:
    return f"{NAME}: parent of the workers of job {job_id}" if job_id else NAME


def _ignore_signals() -> tuple[int, ...]:
    """Have no signal but KILL end this process; return those that we were started with ignored, as
    workers shall be.

    Signals for the job wake it, and it tells of them; HUP does not if it was ignored at the start
    (nohup).
    """
    # Of INT and QUIT a script's ``&`` makes deaf, too; but workers are to obey when we ask them.
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
        signal.signal(number, _nothing)
    return ignored


def _nothing(*_: object) -> None:
    """Have a signal do nothing but wake the loop, which is given its number."""


def _close_inherited(*, keep: Collection[int]) -> None:
    close_all_but(keep)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        if descriptor != null:
            os.dup2(null, descriptor)


class Spawner:
    """Starts, signals, reaps and sweeps on the agent's word."""

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
        """The user's, which is restored if the agent vanishes."""
        self._channel = channel
        self._watched = watched
        self._agent = agent
        self._act_at: float | None = None  # if the agent has not done so at its own channel's end
        self._ends = False
        self._job_id = job_id
        self._orphan_grace_s = orphan_grace_s
        self._setup = w.Setup(env={}, cwd="/", cookie="", nofile=1024, signal_group=False)
        self._pids: dict[int, int] = {}  # pid -> rank, of workers not reaped yet
        self._temporary_dir_lock = -1
        self._asked: set[int] = set()  # pids of workers that were asked to end
        self._terminals: set[int] = set()  # ranks
        self._paused = False  # the agent had all trees stopped: that one is now, is no news
        self._failed: dict[
            int, tuple[str, int]
        ] = {}  # pid -> step and errno of what could not become a worker
        self._trees = WorkerTrees("")
        self._ends_leftovers = False
        self._sweeps_when_gone = False
        self._looked_at = 0.0
        self._look_at: float | None = None  # leftovers have come or gone since
        self._warm = WarmStart(
            fork=self._fork, cold=self._spawn, came_up=self._register, report=self._report
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
        )  # SIGCHLD must come, whatever our starter had blocked
        signal.signal(signal.SIGCHLD, _nothing)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)

    def run(self) -> None:
        """Serve until the agent dismisses us or is gone; then nothing of ours is left."""
        self._report(w.Running(pid=os.getpid()))
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
                    self._rouse_agent()
            if self._act_at is not None and time.monotonic() >= self._act_at:
                break
            self._warm.read()
            self._reap()
            self._output.close_finished()
            self._look_at_leftovers()
            try:
                self._channel.flush()
            except OSError:
                break
            messages = self._channel.receive()
            if messages is None:
                break
            for message in messages:
                self._act_at = self._act_at if self._ends else None  # it does act
                if isinstance(message, w.ExitSpawner):
                    self._warm.stop()
                    self._kill_all()
                    return
                self._handle(message)
        self._orphaned()

    def _timeout_ms(self) -> float | None:
        times = [] if self._warm.timeout_s is None else [self._warm.timeout_s]
        times += [at - time.monotonic() for at in (self._act_at, self._look_at) if at is not None]
        times += [] if self._output.timeout_s is None else [self._output.timeout_s]
        return min(max(0.0, min(times)), _LONGEST_POLL_S) * 1000 if times else None

    def _rouse_agent(self) -> None:
        """See to it that the agent notices the end of its channel: somebody may have stopped it."""
        self._unwatch()
        self._act_at = time.monotonic() + ROUSE_S
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
                self._set_up(message)
            case w.Spawn():
                descriptors = [self._channel.received.popleft() for _ in message.descriptors]
                read_ends = [self._channel.received.popleft() for _ in message.read_ends]
                self._output.keep(message.rank, message.read_ends, read_ends)
                if self._warm.can_fork(message):
                    self._warm.spawn(message, self._setup, descriptors)
                    return
                self._spawn(message, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
            case w.Preload():
                output = self._channel.received.popleft()
                if is_debugged():  # it follows what is executed, not what a server forks
                    self._report(w.PreloadFailed(reason="a debugger follows the workers"))
                else:
                    self._warm.preload(message, self._setup, output)
                os.close(output)
            case w.Signal():
                self._warm.signal(message)
                self._signal(message)
            case w.EndLeftovers():
                self._ends_leftovers = True
                if message.asked:
                    self._trees.all_asked()
                self._trees.ask_to_end(self._leftovers())
            case w.Sweep():
                self._warm.settle(bound_s=SETTLE_S)
                leftovers = [] if message.kill else self._leftovers()
                if leftovers:
                    self._sweeps_when_gone = True
                    self._report(w.LeftoversRemain(processes=self._trees.remaining(leftovers)))
                else:
                    self._sweep()
            case w.CoordinatorLost():
                self._unwatch()
                self._act_at = time.monotonic() + message.bound_s
                self._ends = True
            case w.ExitSpawner():
                pass  # the loop's own
            case _:
                assert_never(message)

    def _set_up(self, setup: w.Setup) -> None:
        self._setup = setup
        self._trees = WorkerTrees(setup.cookie)
        self._ends_leftovers = self._sweeps_when_gone = False
        self._shared_memory.expect(setup.shared_memory)
        if setup.temporary_dir:
            self._lock_temporary_dir(setup.temporary_dir)
        if setup.orphan_grace_s is not None:
            self._orphan_grace_s = setup.orphan_grace_s
        if setup.job_id != self._job_id:
            self._job_id = setup.job_id
            rename_process(NAME, _title(setup.job_id))

    def _lock_temporary_dir(self, path: str) -> None:
        """Lock the agent's temporary directory. The lock lasts until this process ends, also if the
        agent is killed.

        The agent makes another directory if the first one has been removed.
        """
        if self._temporary_dir_lock >= 0:
            with suppress(OSError):
                if os.path.samestat(os.fstat(self._temporary_dir_lock), os.stat(path)):
                    return
            os.close(self._temporary_dir_lock)
        from distlaunch.core.agent.workers.temporary_directory import lock_folder

        self._temporary_dir_lock = lock_folder(path)

    def _report(self, message: w.FromSpawner) -> None:
        with suppress(OSError):  # the agent is gone: the read side of the loop sees it
            self._channel.send(message)

    # --- starting

    def _spawn(self, order: w.Spawn, descriptors: Sequence[int]) -> None:
        """Start a worker the cold way: fork and exec."""
        try:
            pid = self._fork(order, descriptors)
        except OSError as exc:
            self._report(w.SpawnFailed(rank=order.rank, step="fork", errno=exc.errno or 0))
            return
        self._register(order, pid)

    def _fork(self, order: w.Spawn, descriptors: Sequence[int]) -> int:
        spawner = os.getpid()
        before = signal.pthread_sigmask(
            signal.SIG_BLOCK, _TO_WORKERS
        )  # else one sent before exec would be ignored
        try:
            pid = fork_from_helper()
            if pid == 0:
                become(order, self._setup, descriptors, spawner, self._failure_end, self._ignored)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid

    def _register(self, order: w.Spawn, pid: int) -> None:
        self._pids[pid] = order.rank
        self._trees.started(pid, order.rank)
        if order.terminal:
            self._terminals.add(order.rank)
        self._report(w.Spawned(rank=order.rank, pid=pid))

    def _read_failures(self) -> None:
        """Take what children have written that could not become workers."""
        text = b""
        with suppress(BlockingIOError):
            while chunk := os.read(self._failures, 65536):
                text += chunk
        for line in text.decode().splitlines():
            pid, step, number = line.split()
            self._failed[int(pid)] = (step, int(number))

    # --- ends

    def _drain_wake(self) -> None:
        """Take what has woken us. Signals for the job are told of, each once however often it came
        meanwhile."""
        numbers = b""
        with suppress(BlockingIOError):
            while woken := os.read(self._wake, 4096):
                numbers += woken
        for number in dict.fromkeys(numbers):
            if number in _FOR_THE_JOB:
                self._report(w.SignalReceived(signum=number))

    def _reap(self) -> None:
        """Reap every child that has ended, workers and adopted orphans alike, and report the
        workers."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._expect_look(worker_ended=pid in self._pids)
            if os.WIFSTOPPED(status):
                rank = self._pids.get(pid)
                if rank in self._terminals and not self._paused:
                    self._report(w.Halted(rank=rank, signum=os.WSTOPSIG(status)))
            elif pid in self._pids:
                self._ended(pid, status)
            else:
                self._warm.reaped(pid, status)

    def _ended(self, pid: int, status: int) -> None:
        rank = self._pids.pop(pid)
        self._asked.discard(pid)
        returncode = os.waitstatus_to_exitcode(status)
        if returncode == NO_WORKER:
            self._read_failures()
        failed = self._failed.pop(pid, None)
        if failed is not None:
            self._report(w.SpawnFailed(rank=rank, step=failed[0], errno=failed[1]))
        else:
            self._report(WorkerExit(rank=rank, pid=pid, returncode=returncode))
            self._output.on_exit(rank)

    # --- what ended workers have left

    def _leftovers(self) -> list[int]:
        return self._trees.tops(self._pids, helpers=(self._warm.pid,))

    def _expect_look(self, *, worker_ended: bool) -> None:
        """Have leftovers looked at once all that has ended is reaped: any process that ends may
        have left others."""
        if self._ends_leftovers or self._sweeps_when_gone:
            self._look_at = 0.0 if worker_ended else self._looked_at + LOOK_AGAIN_S

    def _look_at_leftovers(self) -> None:
        """Ask to end what has been left since, and sweep if that is awaited and nothing is left any
        more."""
        now = time.monotonic()
        if self._look_at is None or now < self._look_at:
            return
        self._look_at, self._looked_at = None, now
        leftovers = self._leftovers()
        if self._ends_leftovers:
            self._trees.ask_to_end(leftovers)
        if self._sweeps_when_gone and not leftovers:
            self._sweep()

    def _sweep(self) -> None:
        """Kill what is left of the attempt, and report that it is over."""
        self._ends_leftovers = self._sweeps_when_gone = False
        left = self._kill_all(spared=self._warm.pid)
        for pid in left:
            self._pids.pop(pid, None)  # of no attempt any more, should it end some day
        self._output.close()
        self._report(w.Swept(left=left, ended=self._trees.ended, killed=self._trees.killed))
        self._trees = WorkerTrees(self._setup.cookie)

    def _signal(self, order: w.Signal) -> None:
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
                self._asked.add(pid)
            if order.scope == w.SCOPE_PROCESS:
                process_tree.send(pid, order.signum)
            elif order.scope == w.SCOPE_GROUP:
                if not order.caught_only:  # a user's signal asks nobody to end
                    self._trees.group_asked(pid, order.signum)
                process_tree.send_to_group(pid, order.signum)
            elif order.signum == signal.SIGKILL:
                self._trees.killed_with_worker(pid)
                process_tree.kill_each_tree([pid])
            else:
                process_tree.signal_tree(pid, order.signum, include_root=True)
        if order.scope == w.SCOPE_TREE and order.signum in (signal.SIGSTOP, signal.SIGCONT):
            for pid in process_tree.children_of(os.getpid()):
                if pid not in self._pids:
                    process_tree.signal_tree(pid, order.signum, include_root=True)

    def _kill_all(self, *, spared: int = 0, bound_s: float = SWEEP_S) -> tuple[int, ...]:
        """KILL every descendant until none is left, or until the bound; remove their files; give
        the pids that stay.

        ``spared``: a child that is left alone, with all that descends from it.
        """
        began = time.monotonic()
        deadline = began + bound_s
        while True:
            self._reap()
            patient = time.monotonic() < began + watcher.CLEANERS_S
            to_kill = [
                pid
                for pid in self._children(spared)
                if not (patient and process_tree.is_cleaner(pid))
            ]
            self._trees.about_to_kill(to_kill)
            process_tree.kill_each_tree(to_kill)
            self._reap()
            left = self._children(spared)
            if not left or time.monotonic() > deadline:
                self._shared_memory.remove()
                return tuple(
                    pid for child in left for pid in (child, *process_tree.descendants_of(child))
                )
            select.select([self._wake], [], [], _SWEEP_STEP_S)
            self._drain_wake()

    @staticmethod
    def _children(spared: int) -> list[int]:
        return [pid for pid in process_tree.children_of(os.getpid()) if pid != spared]

    def _orphaned(self) -> None:
        """End everything, the agent being gone: ask the workers, give the grace, then KILL until
        nothing is left."""
        self._unwatch()  # else the channel would stay open
        if self.terminal is not None:
            self.terminal.restore()
        self._output.start(self._setup)
        deadline = time.monotonic() + self._orphan_grace_s
        self._warm.stop()
        scope = w.SCOPE_GROUP if self._setup.signal_group else w.SCOPE_PROCESS
        # A worker that was asked before the agent was killed may be saving: a second signal could
        # end it.
        unasked = tuple(rank for pid, rank in self._pids.items() if pid not in self._asked)
        ranks = tuple(self._pids.values())
        self._signal(w.Signal(ranks=unasked, signum=signal.SIGTERM, scope=scope, caught_only=False))
        self._signal(
            w.Signal(ranks=ranks, signum=signal.SIGCONT, scope=w.SCOPE_TREE, caught_only=False)
        )
        self._ends_leftovers = True
        while (left_s := deadline - time.monotonic()) > 0:
            self._trees.ask_to_end(leftovers := self._leftovers())
            if not self._pids and not leftovers:
                break
            began = time.monotonic()
            select.select([self._wake], [], [], left_s)
            time.sleep(max(0.0, min(began + LOOK_AGAIN_S, deadline) - time.monotonic()))
            self._drain_wake()
            self._reap()
        while self._kill_all():
            time.sleep(_WEDGED_STEP_S)
        self._output.finish(bound_s=LOGS_S)
        if self._setup.temporary_dir:
            from distlaunch.core.agent.workers.temporary_directory import remove_tree

            remove_tree(self._setup.temporary_dir)
