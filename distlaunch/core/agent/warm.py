"""Layer core.agent: the spawner's side of warm start: a server that imports modules once, and forks workers.

The server (``boot/_distlaunch_warm.py``) runs in the workers' own interpreter, started with their own command. It
says one line per datagram on a socket of its own; orders go to it with the descriptors beside. A worker it has forked
falls to the spawner, whose pid it learns before that worker runs anything: each waits for a byte on a pipe of its own,
and ends at that pipe's end-of-file. So a server that dies leaves no worker that the spawner does not know of, and what
it had not confirmed is started the cold way.
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

from distlaunch.core.agent import tree
from distlaunch.core.agent.streams import extra_numbers
from distlaunch.core.model.text import printable
from distlaunch.core.wire import spawning as w

ANSWER_S = 10.0
"""How long the server may take to fork a worker before it counts as stuck and its orders are carried out cold."""
_CLOSED_S = 0.5
_STEP_S = 0.005
_SENT_AT_ONCE = 16
"""Orders on their way; the others keep their descriptors here, so that neither the socket nor the server is flooded."""
_ROOM_BYTES = 4096
_MESSAGE_BYTES = 65536
_LOAD_TIME = ("PYTHON", "LD_", "GLIBC_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_")
"""Variables that interpreter and libraries read once, as they are loaded: a worker with one of its own starts cold."""
_BY_HAND = "OMP_NUM_THREADS"
"""The one among them that the server's children can be given by other means."""
_NO_DEATH = frozenset({signal.SIGCONT, signal.SIGSTOP, signal.SIGTSTP})
_CUDA_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Has torch ask NVML, not the CUDA runtime, whether there is a GPU: once CUDA has started, no fork can use it."""

Fork = Callable[[w.Spawn, Sequence[int]], int]
"""Forks a child that becomes the program of an order; gives its pid. Raises OSError."""


class _Order:
    """A worker that is to be forked by the server."""

    def __init__(self, spawn: w.Spawn, setup: w.Setup, descriptors: list[int]) -> None:
        self.spawn = spawn
        self.setup = setup
        self.descriptors = descriptors
        self.go = -1
        """Our end of the pipe on which its process, once forked, waits for our word."""

    def close(self) -> None:
        for descriptor in (*self.descriptors, self.go):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptors = []
        self.go = -1


class WarmStart:
    """The server, from ``start`` to its end, and the orders that wait for it."""

    def __init__(
        self,
        *,
        fork: Fork,
        cold: Callable[[w.Spawn, list[int]], None],
        came_up: Callable[[w.Spawn, int], None],
        report: Callable[[w.FromSpawner], None],
    ) -> None:
        """``cold`` starts a worker the other way (and leaves the descriptors open); ``came_up`` registers a pid."""
        self._fork = fork
        self._cold = cold
        self._came_up = came_up
        self._report = report
        self.pid = 0
        """Of the server, until it has been reaped."""
        self._paused = False
        self._socket: socket.socket | None = None
        self._argv: tuple[str, ...] = ()
        self._exec_env: dict[str, str] = {}
        self._importing = ""
        self._ready = False
        self._waiting: deque[_Order] = deque()
        self._sent: dict[int, _Order | None] = {}  # by serial; None: called off, its process ends by itself
        self._serial = 0
        self._heard_at = 0.0
        self.broken: dict[int, tuple[str, int]] = {}
        """By pid, step and errno of what the server had forked and could not become a worker."""

    # --- the server

    def start(self, order: w.Preload, setup: w.Setup, output: int) -> None:
        """Start the server; what it prints goes to ``output``."""
        self._argv = order.argv
        number = extra_numbers(setup.nofile)[0] - 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {
            _CUDA_CHECK: "1",
            **setup.env,
            **order.env,
            "DISTLAUNCH_WARM_FD": str(number),
            "DISTLAUNCH_WARM_MODULES": ",".join(order.modules),
            "DISTLAUNCH_WARM_ROOM": "x" * _ROOM_BYTES,  # workers' variables are to fit where its own were
        }
        self._exec_env = env
        null = os.open(os.devnull, os.O_RDONLY)
        spawn = w.Spawn(
            rank=-1, descriptors=(0, 1, 2, number), argv=order.argv, env=env, cpus=None, terminal=False
        )  # fmt: skip
        self._socket = ours
        ours.setblocking(False)  # noqa: FBT003 - the standard library's signature
        try:
            self.pid = self._fork(spawn, (null, output, output, theirs.fileno()))
        except OSError as exc:
            self._give_up(f"no server can be started: {os.strerror(exc.errno or 0)}")
        finally:
            os.close(null)
            theirs.close()

    def fileno(self) -> int:
        """Give the descriptor to poll for reading, or -1."""
        return self._socket.fileno() if self._socket is not None else -1

    @property
    def timeout_s(self) -> float | None:
        """Give after how long ``read`` is to be called even if there is nothing to read."""
        if not self._sent or self._paused:
            return None
        return max(0.0, self._heard_at + ANSWER_S - time.monotonic())

    @property
    def has_orders_out(self) -> bool:
        """Tell whether a process may exist that is to become a worker and is not known by its pid yet."""
        return bool(self._sent)

    def ended(self, status: int) -> None:
        """Take the server's wait status: it has been reaped."""
        self.pid = 0
        self.read()  # its last words say more
        if self._socket is not None:
            self._give_up(self._how(status))

    def _how(self, status: int) -> str:
        code = os.waitstatus_to_exitcode(status)
        if self._ready:
            what = "the process that workers are forked from"
        elif self._importing:
            what = f"the process that was importing {self._importing}"
        else:
            what = "the process that was to import the modules"
        return f"{what} " + (f"was killed by signal {-code}" if code < 0 else f"ended with {code}")

    def pause(self, *, paused: bool) -> None:
        """Take note that all trees are stopped, or go on: an answer may take as long as that lasts."""
        self._paused = paused
        self._heard_at = time.monotonic()

    def stop(self) -> None:
        """Kill the server and forget what waits for it."""
        for order in (*self._waiting, *self._sent.values()):
            if order is not None:
                order.close()
        self._waiting.clear()
        self._sent.clear()
        self._close()

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self.pid:
            tree.kill_each_tree([self.pid])

    def _give_up(self, reason: str) -> None:
        """Say why, once, and start what waits the cold way."""
        self._close()
        self._report(w.PreloadFailed(reason=reason))
        left = [order for order in (*self._sent.values(), *self._waiting) if order is not None]
        self._sent.clear()
        self._waiting.clear()
        for order in left:
            self._cold(order.spawn, order.descriptors)
            order.close()

    # --- its words

    def read(self) -> None:
        """Take what the server has to say; give it up if it should have said something by now."""
        while self._socket is not None:
            try:
                line = self._socket.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                if self.timeout_s == 0.0:
                    self._give_up("the process that workers are forked from does not answer")
                return
            except OSError:
                line = b""
            if not line:
                if self.pid:  # else its end is being told already
                    self._hung_up()
                return
            self._heard_at = time.monotonic()
            self._hear(line.decode("utf-8", "replace"))
            self._send()

    def _hung_up(self) -> None:
        """Learn how it ended, if it did: its socket is closed just before."""
        reason = "the process that workers are forked from has closed its connection"
        deadline = time.monotonic() + _CLOSED_S
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                reason = self._how(status)
                break
            time.sleep(_STEP_S)
        self._give_up(reason)

    def _hear(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "importing":
            self._importing = rest
        elif word == "ready":
            self._ready = True
            self._report(w.Preloaded())
        elif word == "failed":
            self._give_up(printable(rest))
        elif word == "broken":
            broken, step, number = rest.split()
            self.broken[int(broken)] = (step, int(number))
        else:
            for pair in rest.split():
                serial, pid = map(int, pair.split(":"))
                self._forked(serial, pid)

    def _forked(self, serial: int, pid: int) -> None:
        order = self._sent.pop(serial, None)
        if order is None:
            return
        if pid < 0:
            self._cold(order.spawn, order.descriptors)
        else:
            self._came_up(order.spawn, pid)
            with suppress(OSError):  # it is gone: reaped, or about to be
                os.write(order.go, b"!")
        order.close()

    # --- orders

    def takes(self, order: w.Spawn) -> bool:
        """Tell whether this worker can be forked from the server (that may still be importing)."""
        if self._socket is None or order.argv != self._argv:
            return False
        return not any(
            name.startswith(_LOAD_TIME) and name != _BY_HAND and self._exec_env.get(name) != value
            for name, value in order.env.items()
        )

    def take(self, order: w.Spawn, setup: w.Setup, descriptors: list[int]) -> None:
        """Have a worker forked as soon as the server is ready; the descriptors are ours from now on."""
        self._waiting.append(_Order(order, setup, descriptors))
        self._send()

    def _send(self) -> None:
        while self._ready and self._waiting and len(self._sent) < _SENT_AT_ONCE and self._socket is not None:
            order = self._waiting[0]
            try:
                their_go, order.go = os.pipe()
            except OSError:
                self._waiting.popleft()
                self._refuse(order)
                continue
            try:
                rights = array.array("i", (their_go, *order.descriptors))
                self._socket.sendmsg([self._encoded(order)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            except BlockingIOError:
                os.close(order.go)
                order.go = -1
                return  # it has not read the last ones; what it says of them brings us back here
            except OSError:  # too large an environment for one datagram, or it is gone
                self._waiting.popleft()
                self._refuse(order)
                continue
            finally:
                os.close(their_go)
            self._waiting.popleft()
            if not self._sent:
                self._heard_at = time.monotonic()
            self._sent[self._serial] = order
            self._serial += 1

    def _refuse(self, order: _Order) -> None:
        self._cold(order.spawn, order.descriptors)
        order.close()

    def _encoded(self, order: _Order) -> bytes:
        spawn, setup = order.spawn, order.setup
        changes = changed_variables(self._exec_env, {**setup.env, **spawn.env})
        return marshal.dumps((self._serial, os.getpid(), changes, setup.cwd, spawn.descriptors, spawn.terminal))

    def call_off(self, order: w.Signal) -> None:
        """Do for workers that do not exist yet what the signal would do to them: if it is a deadly one, they end."""
        if order.caught_only or order.signum in _NO_DEATH:
            return
        ranks = set(order.ranks)
        ended = []
        for serial, sent in self._sent.items():
            if sent is not None and sent.spawn.rank in ranks:
                ended.append(sent)
                self._sent[serial] = None
        ended += [waiting for waiting in self._waiting if waiting.spawn.rank in ranks]
        self._waiting = deque(waiting for waiting in self._waiting if waiting.spawn.rank not in ranks)
        for each in ended:
            each.close()
            self._report(w.Exited(rank=each.spawn.rank, pid=0, returncode=-order.signum))

    def settle(self, *, bound_s: float) -> None:
        """Wait until every process that the server was told to fork is known, or has been called off and forked."""
        deadline = time.monotonic() + bound_s
        if self._sent and self.pid:
            tree.send(self.pid, signal.SIGCONT)
        while self._sent and self._socket is not None and (left_s := deadline - time.monotonic()) > 0:
            select.select([self._socket], [], [], left_s)
            self.read()
        if self._sent:
            self._give_up("the process that workers are forked from does not answer")


def changed_variables(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str | None]:
    """Give what turns one environment into the other; None where a variable goes."""
    changes: dict[str, str | None] = {name: None for name in old if name not in new}
    changes.update((name, value) for name, value in new.items() if old.get(name) != value)
    return changes
