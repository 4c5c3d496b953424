"""Warm start in the spawner: a preload server imports modules once, and forks workers.

The server (``boot/_distlaunch_warm.py``) runs in the workers' own interpreter. The spawner sends it
orders with descriptors, and it answers with lines of text, over a socket for datagrams. A forked
worker becomes a child of the spawner and waits for a byte on a pipe before it runs anything. If the
server or a forked process fails before that, the worker is started without the server ("cold").
"""

from __future__ import annotations

import array
import marshal
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal

from distlaunch.core.agent.workers import process_tree
from distlaunch.core.agent.workers.streams import extra_numbers
from distlaunch.core.model.record import assert_never, replace
from distlaunch.core.model.text import ended_how, printable, quoted
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import spawner_messages as w

_LINE_CHARS = 80
_CLOSED_S = 0.5
_STEP_S = 0.005
_SENT_AT_ONCE = 16
"""Largest number of orders sent at a time; further ones are queued."""
_ROOM_BYTES = 4096
_MESSAGE_BYTES = 65536
_LOAD_TIME = (
    "PYTHON",
    "LD_",
    "GLIBC_",
    "MALLOC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "GOTO_",
)
"""Prefixes of variables that are read only while a program is loaded. A worker with another value
than the server is started cold."""
_SETTABLE_LATER = "OMP_NUM_THREADS"
"""The only variable with one of these prefixes that can be changed in forked workers."""
_NO_DEATH = frozenset({signal.SIGCONT, signal.SIGSTOP, signal.SIGTSTP})
_CUDA_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Makes torch ask NVML whether the node has a GPU. Workers cannot use CUDA if the server has
started its runtime."""
_ARROW = "JE_ARROW_MALLOC_CONF"
_NO_THREAD = "background_thread:false"
"""Keeps pyarrow's allocator from starting a thread at its import, by pandas, scikit-learn,
datasets, transformers.trainer and mlflow. Pillow, OpenCV, SciPy, Numba, TensorFlow, wandb,
Lightning, DeepSpeed and Ray start no thread that survives a fork."""
Fork = Callable[[w.Spawn, Sequence[int]], int]
"""Executes the program of an order in a child, and returns its pid. Raises OSError."""
ANSWER_S = 10.0
"""How long the server may take to fork a worker before it is considered stuck."""
START_S = 60.0
"""How long the server's interpreter (perhaps behind ``--setup``'s shell) may take to load our
code."""
SLOW_IMPORT_S = 15.0
"""A slow import is reported after this time, and whenever the duration has doubled."""
Phase = Literal["starting", "importing", "checking", "ready"]


class WarmStart:
    """The preload server, from ``preload`` to its end, and its queue of orders."""

    def __init__(
        self,
        *,
        fork: Fork,
        cold: Callable[[w.Spawn, list[int]], None],
        came_up: Callable[[w.Spawn, int], None],
        report: Callable[[w.FromSpawner], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``cold`` starts a worker without the server, and keeps the descriptors open. ``came_up``
        registers the pid of a forked worker."""
        self._fork = fork
        self._cold = cold
        self._came_up = came_up
        self._report = report
        self._clock = clock
        self.pid = 0
        """Pid of the server; 0 once it has been reaped."""
        self._paused = False
        self._socket: socket.socket | None = None
        self._preload: w.Preload | None = None
        """The request, without the modules that were left out."""
        self._setup: w.Setup | None = None
        self._output = -1
        """Descriptor for the server's output, also for a second server."""
        self._argv: tuple[str, ...] = ()
        self._exec_env: dict[str, str] = {}
        self._phase = ServerPhase(now=0.0, bound_s=None)
        self._waiting: deque[Order] = deque()
        self._sent: dict[
            int, Order | None
        ] = {}  # by serial; None if cancelled (the process ends by itself)
        self._serial = 0
        self._reaped_early: dict[
            int, int
        ] = {}  # pid -> wait status of children reaped while orders were sent

    # --- the server

    def preload(self, preload: w.Preload, setup: w.Setup, output: int) -> None:
        """Start the server. ``output`` is a descriptor for its stdout and stderr, which is
        copied."""
        self._preload, self._setup, self._output = preload, setup, os.dup(output)
        self._start_server(preload, setup)

    def _start_server(self, preload: w.Preload, setup: w.Setup) -> None:
        output = self._output
        self._argv = preload.argv
        self._phase = ServerPhase(now=self._clock(), bound_s=preload.bound_s)
        *reserved, number = extra_numbers(setup.nofile)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {
            _CUDA_CHECK: "1",
            **setup.env,
            **preload.env,
            _ARROW: _without_thread(setup.env.get(_ARROW, "")),
            "DISTLAUNCH_WARM_FD": str(number),
            "DISTLAUNCH_WARM_MODULES": ",".join(preload.modules),
            "DISTLAUNCH_WARM_RESERVED": ",".join(map(str, reserved)),
            "DISTLAUNCH_WARM_ROOM": "x" * _ROOM_BYTES,  # reserves space for the workers' variables
        }
        self._exec_env = env
        null = os.open(os.devnull, os.O_RDONLY)
        spawn = w.Spawn(
            rank=-1,
            descriptors=(0, 1, 2, *reserved, number),
            argv=preload.argv,
            env=env,
            cpus=None,
            terminal=False,
        )
        self._socket = ours
        ours.setblocking(False)  # noqa: FBT003 - the standard library's signature
        try:
            self.pid = self._fork(
                spawn, (null, output, output, *(null for _ in reserved), theirs.fileno())
            )
        except OSError as exc:
            self._give_up(f"no server can be started: {os.strerror(exc.errno or 0)}")
        finally:
            os.close(null)
            theirs.close()

    def _leave_out(self, module: str, reason: str) -> None:
        """Start a new server that imports all modules except ``module``, free of that module's
        changes to the process."""
        preload, setup = self._preload, self._setup
        rest = () if preload is None else tuple(name for name in preload.modules if name != module)
        if preload is None or setup is None or not rest or len(rest) == len(preload.modules):
            self._give_up(reason)
            return
        self._kill_server()
        self._report(w.ModuleLeftOut(module=module, reason=reason))
        self._preload = replace(preload, modules=rest)
        self._start_server(self._preload, setup)

    def _close_output(self) -> None:
        if self._output >= 0:
            os.close(self._output)
            self._output = -1

    def fileno(self) -> int:
        """Return the descriptor to poll for reading; -1 if there is no server."""
        return self._socket.fileno() if self._socket is not None else -1

    @property
    def timeout_s(self) -> float | None:
        """The seconds after which ``read`` is due even without data."""
        deadline = self._phase.deadline(has_orders=bool(self._sent))
        if deadline is None or self._socket is None or self._paused:
            return None
        return max(0.0, deadline - self._clock())

    def on_reaped(self, pid: int, status: int) -> None:
        """Handle the wait status of the server, or of a child that may be a forked worker."""
        if pid == self.pid:
            self.pid = 0
        self.read()  # the server's last message says more
        if self._socket is None:
            return
        if not self.pid:
            self._on_server_lost(
                f"{self._phase.who} {ended_how(os.waitstatus_to_exitcode(status))}"
            )
        elif self._sent:
            self._reaped_early[pid] = status
            for serial, order in list(self._sent.items()):
                if order is not None and order.pid == pid:
                    self._on_fork_lost(serial, order)

    def _on_server_lost(self, reason: str) -> None:
        """Continue without the module that the server was importing, if any; otherwise end the warm
        start."""
        if self._phase.name == "importing":
            self._leave_out(self._phase.importing, reason)
        else:
            self._give_up(reason)

    def _on_fork_lost(self, serial: int, order: Order) -> None:
        """End the warm start: the process for an order has ended before it ran anything."""
        how = ended_how(os.waitstatus_to_exitcode(self._reaped_early.pop(order.pid)))
        self._drop(serial, order)
        self._start_cold(order)
        self._give_up(f"a forked worker {how} before it could run")

    def pause(self, *, paused: bool) -> None:
        """Record that all process trees are stopped or resumed. A stopped server cannot answer."""
        self._paused = paused
        self._phase.restart_timeout(self._clock())

    def stop(self) -> None:
        """Kill the server and drop all orders."""
        for order in (*self._waiting, *self._sent.values()):
            if order is not None:
                order.close()
        self._waiting.clear()
        self._sent.clear()
        self._kill_server()
        self._close_output()

    def _kill_server(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self.pid:
            process_tree.kill_each_tree([self.pid])

    def _give_up(self, reason: str) -> None:
        """Kill the server, report the reason, and start all waiting workers cold."""
        self._kill_server()
        self._close_output()
        self._report(w.PreloadFailed(reason=reason))
        left = [order for order in (*self._sent.values(), *self._waiting) if order is not None]
        self._sent.clear()
        self._waiting.clear()
        for order in left:
            self._start_cold(order)

    def _start_cold(self, order: Order) -> None:
        self._cold(order.spawn, order.descriptors)
        order.close()

    def _drop(self, serial: int, order: Order) -> None:
        """Cancel an order that was sent. The forked process ends by itself; the order stays until
        its pid is known."""
        if order.pid:
            del self._sent[serial]
        else:
            self._sent[serial] = None

    # --- the server's messages

    def read(self) -> None:
        """Process the server's messages. Stop using the server if it has timed out."""
        while self._socket is not None:
            try:
                line = self._socket.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                self._check_timeout()
                return
            except OSError:
                line = b""
            if not line:
                if self.pid:  # otherwise its end is being reported
                    self._on_hangup()
                return
            self._phase.restart_timeout(self._clock())
            self._on_message(line.decode("utf-8", "replace"))
            self._send_orders()

    def _check_timeout(self) -> None:
        """End the warm start if the server has timed out. Report a slow import."""
        if self.timeout_s != 0.0:
            return
        now = self._clock()
        if (reason := self._phase.timeout_reason(now, has_orders=bool(self._sent))) is not None:
            self._on_server_lost(reason)
        elif (slow := self._phase.slow_import(now)) is not None:
            self._report(slow)

    def _on_hangup(self) -> None:
        """Find out how the server ended, after its socket was closed.

        A server that still runs has left its loop and would run the script; stop it.
        """
        reason = f"{self._phase.who} has closed its files, or become another program"
        process_tree.send(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + _CLOSED_S
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                reason = f"{self._phase.who} {ended_how(os.waitstatus_to_exitcode(status))}"
                break
            facts = process_tree.stat_of(self.pid)
            if facts is not None and facts[0] == "T":
                break
            time.sleep(_STEP_S)
        self._on_server_lost(reason)

    def _on_message(self, line: str) -> None:
        """Handle a line of the server. A line that it never sends ends the warm start."""
        kind, _, rest = line.partition(" ")
        number, _, why = rest.partition(" ")
        if kind == "importing":
            self._phase.name, self._phase.importing = "importing", rest
        elif kind == "imported":
            self._phase.name = "checking"
        elif kind == "ready":
            self._phase.name = "ready"
            self._close_output()
            self._report(w.Preloaded())
        elif kind == "failed":
            self._give_up(printable(rest))
        elif kind == "spoiled" and self._phase.name in ("importing", "checking"):
            module, _, why = rest.partition(" ")
            self._leave_out(module, printable(why))
        elif kind == "up" and number.isdecimal():
            self._on_ready(int(number))
        elif kind == "broken" and number.isdecimal():
            self._on_setup_failed(int(number), why)
        elif kind == "forked" and (pairs := _pairs(rest)) is not None:
            for serial, pid in pairs:
                self._on_forked(serial, pid)
        else:
            shown = quoted(line[:_LINE_CHARS])
            self._on_server_lost(
                f"{self._phase.who} sent {shown}: a module has written to a descriptor of ours"
            )

    def _on_forked(self, serial: int, pid: int) -> None:
        """Record the pid of a forked process, which runs once it is set up; start the worker cold
        if the fork failed."""
        order = self._sent.get(serial)
        if order is None or pid < 0:
            self._sent.pop(serial, None)
            if order is not None:
                self._start_cold(order)
            return
        order.pid = pid
        if pid in self._reaped_early:
            self._on_fork_lost(serial, order)
        elif order.is_up:
            self._let_run(serial, order)

    def _on_ready(self, serial: int) -> None:
        order = self._sent.get(serial)
        if order is not None:
            order.is_up = True
            if order.pid:
                self._let_run(serial, order)

    def _let_run(self, serial: int, order: Order) -> None:
        """Register a forked worker, and let it run."""
        del self._sent[serial]
        self._came_up(order.spawn, order.pid)
        with suppress(OSError):  # the worker has ended and will be reaped
            os.write(order.go, b"!")
        order.close()

    def _on_setup_failed(self, serial: int, why: str) -> None:
        """Start a worker cold because its forked process could not be set up. With a reason, give
        up the server."""
        order = self._sent.get(serial)
        if order is None:
            return
        self._drop(serial, order)
        self._start_cold(order)
        if why:
            self._give_up(f"a forked worker could not be set up ({printable(why)})")

    # --- orders

    def can_fork(self, spawn: w.Spawn) -> bool:
        """Return whether this worker can be forked from the server, which may still be
        importing."""
        if self._socket is None or spawn.argv != self._argv:
            return False
        return not any(
            name.startswith(_LOAD_TIME)
            and name != _SETTABLE_LATER
            and self._exec_env.get(name) != value
            for name, value in spawn.env.items()
        )

    def spawn(self, spawn: w.Spawn, setup: w.Setup, descriptors: list[int]) -> None:
        """Fork a worker as soon as the server is ready, or start it cold if the server fails. Takes
        ownership of the descriptors."""
        self._waiting.append(Order(spawn, setup, descriptors))
        self._send_orders()

    def _send_orders(self) -> None:
        while (
            self._phase.name == "ready"
            and self._waiting
            and len(self._sent) < _SENT_AT_ONCE
            and self._socket is not None
        ):
            order = self._waiting[0]
            try:
                their_go, order.go = os.pipe()
            except OSError:
                self._waiting.popleft()
                self._start_cold(order)
                continue
            try:
                rights = array.array("i", (their_go, *order.descriptors))
                self._socket.sendmsg(
                    [order.encoded(self._serial, self._exec_env)],
                    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)],
                )
            except BlockingIOError:
                os.close(order.go)
                order.go = -1
                return  # its queue is full; its next message brings us back here
            except OSError:  # the environment is too large for a datagram, or the server is gone
                self._waiting.popleft()
                self._start_cold(order)
                continue
            finally:
                os.close(their_go)
            self._waiting.popleft()
            if not self._sent:
                self._phase.restart_timeout(self._clock())
                self._reaped_early.clear()
            self._sent[self._serial] = order
            self._serial += 1

    def signal(self, order: w.Signal) -> None:
        """Apply a signal to workers that do not exist yet: cancel the order of a worker that it
        would end."""
        if order.caught_only or order.signum in _NO_DEATH:
            return
        ranks = set(order.ranks)
        ended = []
        for serial, sent in list(self._sent.items()):
            if sent is not None and sent.spawn.rank in ranks:
                ended.append(sent)
                self._drop(serial, sent)
        ended += [waiting for waiting in self._waiting if waiting.spawn.rank in ranks]
        self._waiting = deque(
            waiting for waiting in self._waiting if waiting.spawn.rank not in ranks
        )
        for each in ended:
            each.close()
            self._report(WorkerExit(rank=each.spawn.rank, pid=0, returncode=-order.signum))

    def settle(self, *, bound_s: float) -> None:
        """Wait until the result of every order that was sent is known. If that takes longer than
        ``bound_s``, give up the server."""
        deadline = self._clock() + bound_s
        if self._sent and self.pid:
            process_tree.send(self.pid, signal.SIGCONT)
        while self._sent and self._socket is not None and (left_s := deadline - self._clock()) > 0:
            select.select([self._socket], [], [], left_s)
            self.read()
        if self._sent:
            self._give_up(f"{self._phase.who} does not answer")


class Order:
    """A worker that the server is to fork."""

    def __init__(self, spawn: w.Spawn, setup: w.Setup, descriptors: list[int]) -> None:
        self.spawn = spawn
        self.setup = setup
        self.descriptors = descriptors
        self.go = -1
        """Write end of the pipe on which the forked process waits."""
        self.pid = 0
        """Pid of the forked process, once the server has reported it."""
        self.is_up = False

    def close(self) -> None:
        """Close the order's descriptors. A forked process that waits on one of them then ends."""
        for descriptor in (*self.descriptors, self.go):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptors = []
        self.go = -1

    def encoded(self, serial: int, old_env: Mapping[str, str]) -> bytes:
        """Return the order as bytes. ``old_env`` is the environment with which the server was
        started."""
        spawn, setup = self.spawn, self.setup
        changes = changed_variables(old_env, {**setup.env, **spawn.env})
        return marshal.dumps(
            (serial, os.getpid(), changes, setup.cwd, spawn.descriptors, spawn.cpus, spawn.terminal)
        )


def changed_variables(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str | None]:
    """Return the changes from ``old`` to ``new``. None stands for a removed variable."""
    changes: dict[str, str | None] = {name: None for name in old if name not in new}
    changes.update((name, value) for name, value in new.items() if old.get(name) != value)
    return changes


class ServerPhase:
    """The current phase of the server, and when it began. All times are on one clock."""

    def __init__(self, *, now: float, bound_s: float | None) -> None:
        """``bound_s`` is the longest time for the import of one module."""
        self.name: Phase = "starting"
        self.importing = ""
        self._bound_s = bound_s
        self._began = self._since = now
        self._report_at = now + SLOW_IMPORT_S

    def restart_timeout(self, now: float) -> None:
        """Restart the timeout, when a message has arrived or the server has something new to do."""
        self._since = now

    def deadline(self, *, has_orders: bool) -> float | None:
        """Return when ``timeout_reason`` or ``slow_import`` may return a value."""
        due = self._answer_due(has_orders=has_orders)
        if self.name in ("checking", "ready"):
            return due
        return self._report_at if due is None else min(due, self._report_at)

    def _answer_due(self, *, has_orders: bool) -> float | None:
        match self.name:
            case "starting":
                return self._since + START_S
            case "importing":
                return None if self._bound_s is None else self._since + self._bound_s
            case "checking":
                return self._since + ANSWER_S
            case "ready":
                return self._since + ANSWER_S if has_orders else None
        assert_never(self.name)

    def timeout_reason(self, now: float, *, has_orders: bool) -> str | None:
        """Return why the server has timed out, if it has."""
        due = self._answer_due(has_orders=has_orders)
        if due is None or now < due:
            return None
        match self.name:
            case "starting":
                return (
                    f"after {now - self._since:.0f} s the workers' interpreter has not begun to "
                    "import"
                )
            case "importing":
                return f"importing {self.importing} did not end within {now - self._since:.1f} s"
            case "checking":
                return "a trial fork after the imports does not end"
            case "ready":
                return f"{self.who} does not answer"
        assert_never(self.name)

    def slow_import(self, now: float) -> w.StillPreloading | None:
        """Return a report about a slow import, if one is due."""
        if self.name in ("checking", "ready") or now < self._report_at:
            return None
        elapsed_s = now - self._began
        self._report_at = now + elapsed_s
        return w.StillPreloading(module=self.importing, elapsed_s=elapsed_s)

    @property
    def who(self) -> str:
        """The server's name in messages."""
        match self.name:
            case "starting":
                return "the process that was to import the modules"
            case "importing":
                return f"the process that was importing {self.importing}"
            case "checking" | "ready":
                return "the process that workers are forked from"
        assert_never(self.name)


def _without_thread(settings: str) -> str:
    """Return the allocator settings with the background thread disabled, unless they mention it."""
    if not settings:
        return _NO_THREAD
    return settings if "background_thread:" in settings else f"{settings},{_NO_THREAD}"


def _pairs(text: str) -> list[tuple[int, int]] | None:
    """Return the pairs in ``<serial>:<pid> ...``; None for another form."""
    try:
        return [
            (int(serial), int(pid)) for serial, pid in (pair.split(":") for pair in text.split())
        ]
    except ValueError:
        return None
