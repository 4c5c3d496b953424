"""The spawner's side of warm start: a server imports modules once, and workers are forked from it.

The server (``boot/_distlaunch_warm.py``) runs in the workers' own interpreter. It sends one line
per datagram on a socket; orders go to it with the descriptors attached. A forked worker becomes a
child of the spawner, reports there, and waits for a byte on a pipe before it runs anything. If the
server or a forked process fails before that, the worker is started without the server.
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
"""Orders on their way; the others keep their descriptors here, so that neither the socket nor the
server is flooded."""
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
"""Variables that interpreter and libraries read once, as they are loaded: a worker with one of its
own starts cold."""
_BY_HAND = "OMP_NUM_THREADS"
"""The one among them that the server's children can be given by other means."""
_NO_DEATH = frozenset({signal.SIGCONT, signal.SIGSTOP, signal.SIGTSTP})
_CUDA_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Has torch ask NVML, not the CUDA runtime, whether there is a GPU: once CUDA has started, no fork
can use it."""
_ARROW = "JE_ARROW_MALLOC_CONF"
_NO_THREAD = "background_thread:false"
"""Has pyarrow's allocator start no thread as it is imported, which pandas, scikit-learn, datasets,
transformers.trainer and mlflow do. Pillow, OpenCV, SciPy, Numba, TensorFlow, wandb, Lightning,
DeepSpeed and Ray leave no thread that survives a fork."""
Fork = Callable[[w.Spawn, Sequence[int]], int]
"""Forks a child that becomes the program of an order; gives its pid. Raises OSError."""
ANSWER_S = 10.0
"""How long the server may take to fork a worker before it counts as stuck and its orders are
carried out cold."""
FIRST_WORD_S = 60.0
"""How long its interpreter (behind ``--setup``'s shell, maybe) may take to come to our code, if it
ever does."""
NOTE_S = 15.0
"""After so long it is told what is still being imported; again after twice that, and so on."""
Phase = Literal["starting", "importing", "checking", "ready"]


class WarmStart:
    """The server, from ``preload`` to its end, and the orders that wait for it."""

    def __init__(
        self,
        *,
        fork: Fork,
        cold: Callable[[w.Spawn, list[int]], None],
        came_up: Callable[[w.Spawn, int], None],
        report: Callable[[w.FromSpawner], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``cold`` starts a worker the other way (and leaves the descriptors open); ``came_up``
        registers a pid."""
        self._fork = fork
        self._cold = cold
        self._came_up = came_up
        self._report = report
        self._clock = clock
        self.pid = 0
        """Of the server, until it has been reaped."""
        self._paused = False
        self._socket: socket.socket | None = None
        self._preload: w.Preload | None = None
        """What was asked for, without the modules that were left out."""
        self._setup: w.Setup | None = None
        self._output = -1
        """Where the server's output goes, kept for one that takes its place while modules are
        imported."""
        self._argv: tuple[str, ...] = ()
        self._exec_env: dict[str, str] = {}
        self._phase = ServerPhase(now=0.0, bound_s=None)
        self._waiting: deque[Order] = deque()
        self._sent: dict[
            int, Order | None
        ] = {}  # by serial; None: called off, its process ends by itself
        self._serial = 0
        self._early: dict[
            int, int
        ] = {}  # pid -> wait status of what was reaped while orders were on their way

    # --- the server

    def preload(self, preload: w.Preload, setup: w.Setup, output: int) -> None:
        """Start the server; what it prints goes to ``output``."""
        self._preload, self._setup, self._output = preload, setup, os.dup(output)
        self._start(preload, setup)

    def _start(self, preload: w.Preload, setup: w.Setup) -> None:
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
            "DISTLAUNCH_WARM_ROOM": "x"
            * _ROOM_BYTES,  # workers' variables are to fit where its own were
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
        """Go on without a module that spoils the server: with a new server that imports the others.

        Whatever that module has left in the process of the server goes with it.
        """
        preload, setup = self._preload, self._setup
        rest = () if preload is None else tuple(name for name in preload.modules if name != module)
        if preload is None or setup is None or not rest or len(rest) == len(preload.modules):
            self._give_up(reason)
            return
        self._close()
        self._report(w.ModuleLeftOut(module=module, reason=reason))
        self._preload = replace(preload, modules=rest)
        self._start(self._preload, setup)

    def _let_go_of_output(self) -> None:
        if self._output >= 0:
            os.close(self._output)
            self._output = -1

    def fileno(self) -> int:
        """Return the descriptor to poll for reading, or -1."""
        return self._socket.fileno() if self._socket is not None else -1

    @property
    def timeout_s(self) -> float | None:
        """Give after how long ``read`` is to be called even if there is nothing to read."""
        deadline = self._phase.deadline(has_orders=bool(self._sent))
        if deadline is None or self._socket is None or self._paused:
            return None
        return max(0.0, deadline - self._clock())

    def reaped(self, pid: int, status: int) -> None:
        """Take the wait status of the server, or of a child that may be one it has forked and is no
        worker yet."""
        if pid == self.pid:
            self.pid = 0
        self.read()  # last words say more
        if self._socket is None:
            return
        if not self.pid:
            self._lost_server(f"{self._phase.who} {ended_how(os.waitstatus_to_exitcode(status))}")
        elif self._sent:
            self._early[pid] = status
            for serial, order in list(self._sent.items()):
                if order is not None and order.pid == pid:
                    self._lost(serial, order)

    def _lost_server(self, reason: str) -> None:
        """Take in that the server is of no use any more: the module that it was importing is the
        cause, if any is."""
        if self._phase.name == "importing":
            self._leave_out(self._phase.importing, reason)
        else:
            self._give_up(reason)

    def _lost(self, serial: int, order: Order) -> None:
        """Give up: the process for this order has ended before it ran anything, and did not say
        why."""
        how = ended_how(os.waitstatus_to_exitcode(self._early.pop(order.pid)))
        self._drop(serial, order)
        self._go_cold(order)
        self._give_up(f"a forked worker {how} before it could run")

    def pause(self, *, paused: bool) -> None:
        """Take note that all trees are stopped, or go on: an answer may take as long as that
        lasts."""
        self._paused = paused
        self._phase.heard(self._clock())

    def stop(self) -> None:
        """Kill the server and forget what waits for it."""
        for order in (*self._waiting, *self._sent.values()):
            if order is not None:
                order.close()
        self._waiting.clear()
        self._sent.clear()
        self._close()
        self._let_go_of_output()

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self.pid:
            process_tree.kill_each_tree([self.pid])

    def _give_up(self, reason: str) -> None:
        """Say why, once, and start what waits the cold way."""
        self._close()
        self._let_go_of_output()
        self._report(w.PreloadFailed(reason=reason))
        left = [order for order in (*self._sent.values(), *self._waiting) if order is not None]
        self._sent.clear()
        self._waiting.clear()
        for order in left:
            self._go_cold(order)

    def _go_cold(self, order: Order) -> None:
        self._cold(order.spawn, order.descriptors)
        order.close()

    def _drop(self, serial: int, order: Order) -> None:
        """Do not go on with what was sent; its process ends by itself, and is waited for until it
        is known."""
        if order.pid:
            del self._sent[serial]
        else:
            self._sent[serial] = None

    # --- its words

    def read(self) -> None:
        """Take what the server has to say; give it up if it should have said something by now."""
        while self._socket is not None:
            try:
                line = self._socket.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                self._look_at_the_clock()
                return
            except OSError:
                line = b""
            if not line:
                if self.pid:  # else its end is being told already
                    self._hung_up()
                return
            self._phase.heard(self._clock())
            self._hear(line.decode("utf-8", "replace"))
            self._send()

    def _look_at_the_clock(self) -> None:
        """Give the server up if it should have said something by now; tell of an import that takes
        long."""
        if self.timeout_s != 0.0:
            return
        now = self._clock()
        if (reason := self._phase.late(now, has_orders=bool(self._sent))) is not None:
            self._lost_server(reason)
        elif (note := self._phase.note(now)) is not None:
            self._report(note)

    def _hung_up(self) -> None:
        """Learn how it ended, if it did: its socket is closed just before. Else it must not go on
        to run the script."""
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
        self._lost_server(reason)

    def _hear(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        number, _, why = rest.partition(" ")
        if word == "importing":
            self._phase.name, self._phase.importing = "importing", rest
        elif word == "imported":
            self._phase.name = "checking"
        elif word == "ready":
            self._phase.name = "ready"
            self._let_go_of_output()
            self._report(w.Preloaded())
        elif word == "failed":
            self._give_up(printable(rest))
        elif word == "spoiled" and self._phase.name in ("importing", "checking"):
            module, _, why = rest.partition(" ")
            self._leave_out(module, printable(why))
        elif word == "up" and number.isdecimal():
            self._is_up(int(number))
        elif word == "broken" and number.isdecimal():
            self._is_broken(int(number), why)
        elif word == "forked" and (pairs := _pairs(rest)) is not None:
            for serial, pid in pairs:
                self._forked(serial, pid)
        else:
            said = quoted(line[:_LINE_CHARS])
            self._lost_server(
                f"{self._phase.who} said {said}: a module has written to a descriptor of ours"
            )

    def _forked(self, serial: int, pid: int) -> None:
        order = self._sent.get(serial)
        if order is None or pid < 0:
            self._sent.pop(serial, None)
            if order is not None:
                self._go_cold(order)
            return
        order.pid = pid
        if pid in self._early:
            self._lost(serial, order)
        elif order.is_up:
            self._run(serial, order)

    def _is_up(self, serial: int) -> None:
        order = self._sent.get(serial)
        if order is not None:
            order.is_up = True
            if order.pid:
                self._run(serial, order)

    def _run(self, serial: int, order: Order) -> None:
        del self._sent[serial]
        self._came_up(order.spawn, order.pid)
        with suppress(OSError):  # it is gone, and will be reaped
            os.write(order.go, b"!")
        order.close()

    def _is_broken(self, serial: int, why: str) -> None:
        order = self._sent.get(serial)
        if order is None:
            return
        self._drop(serial, order)
        self._go_cold(order)
        if why:
            self._give_up(f"a forked worker could not be set up ({printable(why)})")

    # --- orders

    def can_fork(self, spawn: w.Spawn) -> bool:
        """Return whether this worker can be forked from the server (that may still be importing)."""
        if self._socket is None or spawn.argv != self._argv:
            return False
        return not any(
            name.startswith(_LOAD_TIME) and name != _BY_HAND and self._exec_env.get(name) != value
            for name, value in spawn.env.items()
        )

    def spawn(self, spawn: w.Spawn, setup: w.Setup, descriptors: list[int]) -> None:
        """Have a worker forked as soon as the server is ready; the descriptors are ours from now
        on."""
        self._waiting.append(Order(spawn, setup, descriptors))
        self._send()

    def _send(self) -> None:
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
                self._go_cold(order)
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
                return  # it has not read the last ones; what it says of them brings us back here
            except OSError:  # too large an environment for one datagram, or it is gone
                self._waiting.popleft()
                self._go_cold(order)
                continue
            finally:
                os.close(their_go)
            self._waiting.popleft()
            if not self._sent:
                self._phase.heard(self._clock())
                self._early.clear()
            self._sent[self._serial] = order
            self._serial += 1

    def signal(self, order: w.Signal) -> None:
        """Do for workers that do not exist yet what the signal would do to them: if it is a deadly
        one, they end."""
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
        """Wait until every process that the server was told to fork is known, or has been called
        off and forked."""
        deadline = self._clock() + bound_s
        if self._sent and self.pid:
            process_tree.send(self.pid, signal.SIGCONT)
        while self._sent and self._socket is not None and (left_s := deadline - self._clock()) > 0:
            select.select([self._socket], [], [], left_s)
            self.read()
        if self._sent:
            self._give_up(f"{self._phase.who} does not answer")


class Order:
    """A worker that is to be forked by the server."""

    def __init__(self, spawn: w.Spawn, setup: w.Setup, descriptors: list[int]) -> None:
        self.spawn = spawn
        self.setup = setup
        self.descriptors = descriptors
        self.go = -1
        """Our end of the pipe on which its process, once forked, waits for our word."""
        self.pid = 0
        """Of that process, once the server has told of it; it is a child of ours then."""
        self.is_up = False
        """That process has set itself up."""

    def close(self) -> None:
        """Let go of its descriptors; a process that waits for our word on one of them then ends."""
        for descriptor in (*self.descriptors, self.go):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptors = []
        self.go = -1

    def encoded(self, serial: int, old_env: Mapping[str, str]) -> bytes:
        """Encode it for the server, whose own environment was ``old_env``."""
        spawn, setup = self.spawn, self.setup
        changes = changed_variables(old_env, {**setup.env, **spawn.env})
        return marshal.dumps(
            (serial, os.getpid(), changes, setup.cwd, spawn.descriptors, spawn.cpus, spawn.terminal)
        )


def changed_variables(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str | None]:
    """Return what turns one environment into the other; None where a variable goes."""
    changes: dict[str, str | None] = {name: None for name in old if name not in new}
    changes.update((name, value) for name, value in new.items() if old.get(name) != value)
    return changes


class ServerPhase:
    """What the server does since when; all times are of one clock."""

    def __init__(self, *, now: float, bound_s: float | None) -> None:
        """``bound_s``: how long the import of one module may take."""
        self.name: Phase = "starting"
        self.importing = ""
        self._bound_s = bound_s
        self._began = self._heard = now
        self._note_at = now + NOTE_S

    def heard(self, now: float) -> None:
        """Take note of a word of the server, or of a moment from which on it is to be waited
        for."""
        self._heard = now

    def deadline(self, *, has_orders: bool) -> float | None:
        """Return when ``late`` or ``note`` will have something to say."""
        due = self._due(has_orders=has_orders)
        if self.name in ("checking", "ready"):
            return due
        return self._note_at if due is None else min(due, self._note_at)

    def _due(self, *, has_orders: bool) -> float | None:
        match self.name:
            case "starting":
                return self._heard + FIRST_WORD_S
            case "importing":
                return None if self._bound_s is None else self._heard + self._bound_s
            case "checking":
                return self._heard + ANSWER_S
            case "ready":
                return self._heard + ANSWER_S if has_orders else None
        assert_never(self.name)

    def late(self, now: float, *, has_orders: bool) -> str | None:
        """Tell why it is not to be waited for any longer, if so."""
        due = self._due(has_orders=has_orders)
        if due is None or now < due:
            return None
        match self.name:
            case "starting":
                return (
                    f"after {now - self._heard:.0f} s the workers' interpreter has not begun to "
                    "import"
                )
            case "importing":
                return f"importing {self.importing} did not end within {now - self._heard:.1f} s"
            case "checking":
                return "a trial fork after the imports does not end"
            case "ready":
                return f"{self.who} does not answer"
        assert_never(self.name)

    def note(self, now: float) -> w.StillPreloading | None:
        """Tell what takes long, if it does and was not told lately."""
        if self.name in ("checking", "ready") or now < self._note_at:
            return None
        elapsed_s = now - self._began
        self._note_at = now + elapsed_s
        return w.StillPreloading(module=self.importing, elapsed_s=elapsed_s)

    @property
    def who(self) -> str:
        """Say who the server is, for a sentence of why it is given up."""
        match self.name:
            case "starting":
                return "the process that was to import the modules"
            case "importing":
                return f"the process that was importing {self.importing}"
            case "checking" | "ready":
                return "the process that workers are forked from"
        assert_never(self.name)


def _without_thread(settings: str) -> str:
    """Add that there is to be no thread to settings of the user's, unless they say something of
    it."""
    if not settings:
        return _NO_THREAD
    return settings if "background_thread:" in settings else f"{settings},{_NO_THREAD}"


def _pairs(text: str) -> list[tuple[int, int]] | None:
    """Take ``<serial>:<pid> ...`` apart; None if it is something else."""
    try:
        return [
            (int(serial), int(pid)) for serial, pid in (pair.split(":") for pair in text.split())
        ]
    except ValueError:
        return None
