"""Check received messages against the state of the job. No clock, no I/O.

``NodeMessageCheck`` checks the messages that a node sends to the coordinator. A node may report
only on ranks that were assigned to it, and send no more output than it has credit for. A message
that violates this is not from a correct agent of this release. It must not be written to files,
shown, or treated as an event of another node's workers.

``CoordinatorMessageCheck`` checks the messages that the coordinator sends to a joined launcher. A
joined launcher runs on another node and carries out the coordinator's decisions.

* Numbers must be within their bounds, because they are passed to the kernel or used in tables.
* Attempts must be in order.
* ``StartWorkers`` is accepted without an earlier ``Prepare`` of the same attempt, because
  ``StartWorkers`` has all values that a start needs.
* The nodes that ``StartWorkers`` lists are checked by the planner, not here.
* No message names a program to run, so there is no such check.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable

from distlaunch.coordinator.runtime.signal_pipe import FOR_THE_JOB
from distlaunch.core.agent.liveness import LONGEST_S
from distlaunch.core.errors import ProtocolError
from distlaunch.core.model.run_files import STDERR, STDOUT
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol.spawner_messages import Leftovers
from distlaunch.planning.joined_checks import MOST_SLOTS, is_address

_LEFT_BYTES = 5 << 20
"""Bytes per worker that an agent may send beyond its credit when the worker ends: two full pipes,
and the output that processes write meanwhile. The sum is doubled, because the streams of processes
that still run are read again after all workers have ended."""
_CHUNK_BYTES = 1 << 20
"""How many bytes an agent may send beyond its credit at any time: one ``Output`` message."""
_LAST_PORT = 65535
_RETURNCODES = range(-128, 256)
"""Possible return codes of a worker: an exit code, or a signal number as a negative number."""


class NodeMessageCheck:
    """Checks the messages of one node, from its first message until the node is disconnected."""

    def __init__(self, granted: int, *, reports_signals: bool = False) -> None:
        """``granted`` is the node's first credit: how many bytes of output it may send.
        ``reports_signals``: the agent reports signals that a scheduler sends to it."""
        self._signals = FOR_THE_JOB if reports_signals else frozenset()
        """The signals that an ``AgentSignalled`` of this node may name."""
        self._attempt = -1
        """The number of the latest attempt that the node was asked to start; -1: none."""
        self._prepared_attempt = -1
        """The number of the latest attempt that the node was asked to prepare; -1: none."""
        self._ports = 0
        """How many ports for workers the node was asked to reserve for ``_prepared_attempt``. The
        master port is not among them."""
        self._ranks: frozenset[int] = frozenset()
        """The ranks of the node's workers in ``_attempt``."""
        self._ranks_with_open_output: set[int] = set()
        """The ranks whose output is written to files: those of the current attempt that have not
        sent ``RankEnded``. Output of other ranks is dropped."""
        self._ranks_ever: set[int] = set()
        """The ranks that the node has had in any attempt. Output of an earlier attempt may arrive
        late; output of a rank that is not in this set is an error."""
        self._granted = granted
        """How many bytes of output the node may have sent in all, apart from ``_LEFT_BYTES``."""
        self._sent = 0
        """How many bytes of output the node has sent in all."""
        self._log_requests: dict[int, int | None] = {}
        """The requests for logs without an answer: the most bytes of the answer by serial number;
        None for a list."""
        self._lowest_credit = -_CHUNK_BYTES
        """The lowest allowed value of ``_granted - _sent``, in bytes. It is negative."""

    def on_send(self, message: object) -> None:
        """Record a message that is sent to the node."""
        if isinstance(message, (m.Prepare, m.Reach)):
            self._prepared_attempt = max(self._prepared_attempt, message.attempt)
            if isinstance(message, m.Prepare):
                self._ports = message.ports
        elif isinstance(message, m.ListLogs):
            self._log_requests[message.serial] = None
        elif isinstance(message, m.ReadLog):
            self._log_requests[message.serial] = message.size
        elif isinstance(message, m.Start):
            self._begin_attempt(message.attempt, (spec.rank for spec in message.workers))
        elif isinstance(message, p.StartWorkers):
            first = sum(message.slots[: message.node_rank])
            self._begin_attempt(
                message.attempt, (first + local_rank for local_rank in message.local_ranks)
            )

    def _begin_attempt(self, attempt: int, ranks: Iterable[int]) -> None:
        self._attempt = self._prepared_attempt = attempt
        self._ranks = frozenset(ranks)
        self._ranks_with_open_output = set(self._ranks)
        self._ranks_ever |= self._ranks
        self._lowest_credit = (
            min(0, self._granted - self._sent) - _CHUNK_BYTES - _LEFT_BYTES * len(self._ranks)
        )

    def begin_attempt(self) -> None:
        """Ignore output of all ranks until the node is asked to start the next attempt, whose
        directory is in use from now on."""
        self._ranks_with_open_output.clear()

    def grant(self, size: int) -> None:
        """Add ``size`` bytes of new credit.

        Only one thread may call this method. One other thread may call ``check`` at the same time.
        """
        self._granted += size

    def check(self, message: object) -> bool:
        """Return whether to handle a message. A late one, which is about an earlier attempt or
        about a rank whose output has ended, must be ignored.

        Counts output against the credit. Raises ProtocolError for a message that no agent of this
        release sends.
        """
        match message:
            case m.Output():
                self._check_output(message)
                return message.rank in self._ranks_with_open_output
            case m.RankEnded():
                self._check_known(message.rank)
                speaks = message.rank in self._ranks_with_open_output
                self._ranks_with_open_output.discard(message.rank)
                return speaks
            case m.WorkerHalted():
                self._check_ranks((message.rank,))
            case m.Prepared() | m.Reached():
                self._check_attempt(message.attempt, self._prepared_attempt)
                if isinstance(message, m.Prepared):
                    self._check_ports(message)
            case m.LeftoversRunning():
                self._is_current(message.attempt, _ranks_of(message.processes))
            case m.AttemptEnded():
                self._is_current(
                    message.attempt, (*_ranks_of(message.ended), *_ranks_of(message.killed))
                )
            case WorkerExit():
                if (
                    self._is_current(message.attempt, (message.rank,))
                    and message.returncode not in _RETURNCODES
                ):
                    raise ProtocolError(f"no process ends with {str(message.returncode)[:20]}")
            case m.Started():
                self._is_current(message.attempt, message.pids)
            case m.Alive():
                saved = [each.rank for each in message.checkpoints]
                beats = [each.rank for each in message.heartbeats]
                self._is_current(message.attempt, (*message.wrote, *beats, *saved))
            case m.SpawnerSignalled():
                self._check_signal(message.signum, FOR_THE_JOB)
            case m.AgentSignalled():
                self._check_signal(message.signum, self._signals)
            case m.Stacks():
                self._is_current(message.attempt, (each.rank for each in message.stacks))
            case m.LogList():
                self._check_log_answer(message.serial, None)
            case m.LogPart():
                self._check_log_answer(message.serial, len(message.data))
            case m.Usage():
                self._is_current(message.attempt, (each.rank for each in message.workers))
        return getattr(message, "attempt", self._attempt) >= self._attempt

    def _is_current(self, attempt: int, ranks: Iterable[int]) -> bool:
        """Return whether an attempt is the latest one. Raise ProtocolError if it is none of this
        node, or the latest with ranks that the node does not run."""
        self._check_attempt(attempt, self._attempt)
        if attempt == self._attempt:
            self._check_ranks(ranks)
        return attempt == self._attempt

    def _check_attempt(self, attempt: int, newest: int) -> None:
        if not 0 <= attempt <= newest:
            raise ProtocolError(f"it tells of attempt {attempt}, which it was not asked to start")

    @staticmethod
    def _check_signal(signum: int, allowed: frozenset[signal.Signals]) -> None:
        if signum not in allowed:
            raise ProtocolError(f"it tells of signal {str(signum)[:20]}, which is not for the job")

    def _check_ranks(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank not in self._ranks:
                raise ProtocolError(f"it tells of rank {rank}, which it does not run")

    def _check_ports(self, message: m.Prepared) -> None:
        """Raise ProtocolError if the ports are invalid or not as many as were requested."""
        ports = message.ports
        wanted = 0 if message.problem is not None else self._ports
        if message.attempt == self._prepared_attempt and (
            len(ports) != wanted or len(set(ports)) != wanted
        ):
            raise ProtocolError(f"it holds {len(set(ports))} ports, and {wanted} are needed")
        if not all(0 < port <= _LAST_PORT for port in ports):
            raise ProtocolError("it tells of ports that cannot be")

    def _check_known(self, rank: int) -> None:
        if rank not in self._ranks_ever:
            raise ProtocolError(f"it sends output of rank {rank}, which it does not run")

    def _check_log_answer(self, serial: int, size: int | None) -> None:
        """Raise ProtocolError unless the answer, a part with ``size`` bytes or a list, was asked
        for."""
        most = self._log_requests.pop(serial, -1)
        if (most is None) != (size is None) or (size is not None and size > (most or 0)):
            raise ProtocolError("it sends a log that it was not asked for")

    def _check_output(self, message: m.Output) -> None:
        self._check_known(message.rank)
        if message.stream not in (STDOUT, STDERR) or not message.data:
            raise ProtocolError(f"it sends {len(message.data)} bytes of a stream {message.stream}")
        self._sent += len(message.data)
        if self._granted - self._sent < self._lowest_credit:
            raise ProtocolError("it sends more output than was asked for")


def _ranks_of(leftovers: Leftovers) -> list[int]:
    return [process.rank for process in leftovers.shown if process.rank is not None]


ASKING = frozenset(
    {0, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL}
)
"""Signals that stop workers. 0: the workers have been signalled already, for example by Slurm,
which signals all processes of a step."""
PASSED_ON = frozenset({signal.SIGUSR1, signal.SIGUSR2})
"""Signals that the coordinator may forward to the workers."""
_LONGEST_TOKEN = 256
"""Largest number of characters of the token of a ``Reach``."""
_LONGEST_REACH_S = 600.0
"""Largest number of seconds of ``Reach.bound_s``."""


class CoordinatorMessageCheck:
    """Checks the coordinator's messages to a joined launcher."""

    def __init__(self) -> None:
        self.attempt = -1
        """The number of the latest attempt that was started on this node; -1: none."""
        self._prepared = -1
        """The number of the latest attempt that the coordinator has had prepared on this node; -1:
        none. Attempts must be prepared in ascending order."""

    def joined(self) -> None:
        """Record that the launcher has joined again.

        The coordinator may be another process, which does not know an attempt that was only
        prepared.
        """
        self._prepared = self.attempt

    def check(self, message: p.ToLauncher, *, running: bool) -> None:
        """Raise ProtocolError for a message that no coordinator of this release sends.

        ``running``: workers run on this node.
        """
        match message:
            case m.Prepare():
                if message.port is not None:
                    raise ProtocolError("it wants a port held, which is its own node's to hold")
                if message.attempt <= self._prepared or not p.is_possible_attempt(message.attempt):
                    raise ProtocolError(
                        f"it prepares attempt {message.attempt} after {self._prepared}"
                    )
                if not 0 <= message.ports <= MOST_SLOTS:
                    raise ProtocolError(f"it wants {message.ports} ports held")
                self._prepared = message.attempt
            case m.Reach():
                self._check_reach(message)
            case p.StartWorkers():
                # Stopping the running workers first would take their grace, and the coordinator
                # does not wait for that. It must know that they run.
                if running:
                    raise ProtocolError(
                        f"it starts attempt {message.attempt} while {self.attempt} runs"
                    )
            case m.Stop():
                if message.signum not in ASKING or not 0 <= message.grace_s <= LONGEST_S:
                    raise ProtocolError(
                        f"it stops workers by signal {message.signum} within "
                        f"{message.grace_s:.3g} s"
                    )
            case m.WaitForLeftovers():
                if not (0 <= message.linger_s <= LONGEST_S and 0 <= message.grace_s <= LONGEST_S):
                    raise ProtocolError(
                        f"it has what workers left end within {message.linger_s:.3g} s"
                    )
            case m.ForwardSignal():
                if message.signum not in PASSED_ON:
                    raise ProtocolError(f"it passes signal {message.signum} on")
            case m.ListLogs() | m.ReadLog():
                if message.directory:
                    raise ProtocolError("it names a directory of logs, which are its own node's")
            case p.ExitLauncher():
                if not 0 <= message.exit_code <= 255:
                    raise ProtocolError(
                        f"it ends the job with {message.exit_code}, which is no exit code"
                    )
                if running and message.exit_code == 0:
                    raise ProtocolError("it ends the job with 0 while workers run here")
            case p.Challenge() | p.Rejected() | p.Welcome():
                raise ProtocolError(f"it says {type(message).__name__} to whom it has let in")
            case _:
                pass

    def _check_reach(self, order: m.Reach) -> None:
        sane = (
            order.attempt == self._prepared
            and 0 < order.port <= 65535
            and all(map(is_address, order.addresses))
            and order.token.isascii()
            and order.token.isalnum()
            and len(order.token) <= _LONGEST_TOKEN
            and 0 < order.bound_s <= _LONGEST_REACH_S
        )
        if not sane:
            raise ProtocolError("it sends a search for rank 0's node that makes no sense")
