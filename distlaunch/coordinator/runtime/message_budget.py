"""Limit the messages on one connection: how many may come, and how large each may be.

The size depends on the type, and on whether the node has greeted and has workers. No clock, no I/O.
The amount of output is not counted here; ``message_checks`` limits it by credit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from distlaunch.core.errors import ProtocolError
from distlaunch.core.model.record import Record
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol.codec import MAX_RAW_BYTES, FrameSize

_BURST = 64
"""Number of messages that a new connection may send without having been asked."""
_PER_S = 4.0
"""Messages per second. An agent sends ``Alive`` once a second, and now and then a warning."""
_MOST_SAVED = 1 << 16
"""Largest number of messages that can be saved up. A launcher that was suspended for hours finds at
most this many."""
_PER_WORKER = 4
"""``Started``, ``WorkerExit`` and ``RankEnded`` are sent once for each worker of an attempt."""
_PER_START = 16
_FEW = FrameSize(object_bytes=16 << 10, raw_bytes=0)
_NONE = FrameSize(object_bytes=0, raw_bytes=0)
_USUAL_BYTES = 64 << 10
_SURVEY_BYTES = 4 << 20
_ESCAPED = 6
r"""JSON may write one byte of text as six bytes (``\u00e9``)."""
_ERROR_FILE_BYTES = _ESCAPED * (256 << 10)
_TAIL_BYTES = 64 << 10
_STDOUT_TAIL_BYTES = _ESCAPED * (8 << 10)
_STACKS_BYTES = _ESCAPED * (8 << 20)
_STACK_BYTES = _ESCAPED * (64 << 10) + 16384
_HEARTBEAT_BYTES = 16 << 10
_PID_BYTES = 40
_USAGE_BYTES = 1024
_LOG_INFO_BYTES = 2 * 160
"""Two files of a rank."""
_PORT_BYTES = 8
_TEXT_BYTES = 512 << 10
"""Size of ``AgentFailed``, ``AgentEnding`` and ``PreloadEnded``, which quote a traceback."""

_USUAL = FrameSize(object_bytes=_USUAL_BYTES, raw_bytes=0)
_TEXT = FrameSize(object_bytes=_TEXT_BYTES, raw_bytes=0)
NODE_SIZES: dict[type, FrameSize] = {
    m.Prepared: _USUAL,
    m.Started: _USUAL,
    WorkerExit: FrameSize(
        object_bytes=_ERROR_FILE_BYTES + _STDOUT_TAIL_BYTES + _USUAL_BYTES, raw_bytes=_TAIL_BYTES
    ),
    m.WorkerHalted: _USUAL,
    m.Alive: _USUAL,
    m.Stacks: _USUAL,
    m.Usage: _USUAL,
    m.LogList: _USUAL,
    m.LogPart: FrameSize(object_bytes=_USUAL_BYTES, raw_bytes=m.LOG_PART_BYTES),
    m.AgentNotice: _USUAL,
    m.PreloadEnded: _TEXT,
    m.LeftoversRunning: _USUAL,
    m.SpawnerSignalled: _USUAL,
    m.AttemptEnded: _USUAL,
    m.AgentFailed: _TEXT,
    m.Hello: _USUAL,
    m.Surveyed: _USUAL,
    m.Reached: _USUAL,
    m.Pong: _USUAL,
    m.Output: FrameSize(object_bytes=_USUAL_BYTES, raw_bytes=MAX_RAW_BYTES),
    m.RankEnded: _USUAL,
    m.StdinConsumed: _USUAL,
    m.AgentEnding: _TEXT,
    m.AgentSignalled: _USUAL,
    p.Call: _USUAL,
    p.Proof: _USUAL,
    p.LauncherInfo: _USUAL,
    p.LauncherSignalled: _USUAL,
}
"""Largest sizes of messages of a node that has sent its first message. ``NodeBudget.size_of``
adapts some of these sizes."""
COORDINATOR_SIZES: dict[type, FrameSize] = {
    m.Prepare: _USUAL,
    m.Stop: _USUAL,
    m.WaitForLeftovers: _USUAL,
    m.ForwardSignal: _USUAL,
    m.Pause: _USUAL,
    m.CollectStacks: _USUAL,
    m.ReadUsage: _USUAL,
    m.ListLogs: FrameSize(object_bytes=4 << 20, raw_bytes=0),
    m.ReadLog: _USUAL,
    m.Reach: _USUAL,
    m.Ping: _USUAL,
    p.Challenge: _USUAL,
    p.Rejected: _USUAL,
    p.Welcome: _USUAL,
    p.SurveyNode: _USUAL,
    p.StartWorkers: FrameSize(object_bytes=32 << 20, raw_bytes=0),
    p.ExitLauncher: FrameSize(object_bytes=4 << 20, raw_bytes=0),
    p.Notice: FrameSize(object_bytes=2 << 20, raw_bytes=0),
}
"""Sizes of the messages of a coordinator. ``StartWorkers`` lists all nodes and the ports of all
workers."""
_NODE_SIZES = {kind.__name__: size for kind, size in NODE_SIZES.items()}
_COORDINATOR_SIZES = {kind.__name__: size for kind, size in COORDINATOR_SIZES.items()}
_COORDINATOR_BURST, _COORDINATOR_PER_S = 4096, 64.0


class Budget(ABC):
    """The number of messages that a connection may still send.

    The number grows with time, and with each request to the other side. Times are seconds of any
    monotonic clock.
    """

    def __init__(self, now: float, *, burst: float = _BURST, per_s: float = _PER_S) -> None:
        self._left = burst
        self._per_s = per_s
        self._at = now

    def allow(self, count: int) -> None:
        """Allow this many more messages."""
        self._left = min(self._left + count, _MOST_SAVED)

    def charge(self, message: Record, now: float) -> None:
        """Count a received message. Raises ProtocolError if the number is used up."""
        self._left = min(self._left + max(0.0, now - self._at) * self._per_s, _MOST_SAVED)
        self._at = now
        self._left -= 1
        if self._left < 0:
            raise ProtocolError(
                f"more messages than were asked for, the last of them {type(message).__name__}"
            )

    def on_sent(self, message: Record) -> None:  # noqa: B027 - most budgets do not depend on it
        """Do nothing here. Subclasses allow the answers to a message to the other side."""

    def on_greeting(self) -> None:  # noqa: B027 - same
        """Do nothing here. Subclasses record that the other side has sent its first message."""

    @abstractmethod
    def size_of(self, name: str) -> FrameSize:
        """Return the largest size of a frame of the message type ``name`` at this moment."""


class NodeBudget(Budget):
    """The messages that an agent or a joined launcher may send to the coordinator."""

    def __init__(self, now: float) -> None:
        super().__init__(now)
        self._has_greeted = False
        self._surveys = 0
        self._workers = 0
        """The largest number of workers that any attempt has had on this node."""
        self._ports = 0
        self._stacks = 0
        self._listed = 0
        """The largest number of ranks whose logs the node was asked to list."""
        self._parts = 0
        """Parts of logs that the node was asked for and has not sent."""
        self._stdin_unread = 0
        """Bytes of stdin that were sent and that the node has not reported as read."""

    def on_greeting(self) -> None:
        """Record that the node has sent its first message."""
        self._has_greeted = True

    def on_sent(self, message: Record) -> None:
        """Allow the messages that may answer a message to the node.

        ``Credit`` is not counted, because other threads send it.
        """
        match message:
            case m.Credit():
                return
            case m.Survey() | p.SurveyNode():
                self._surveys += 1
            case m.Prepare():
                self._ports = max(self._ports, message.ports)
            case m.Start():
                self._allow_workers(len(message.workers))
            case p.StartWorkers():
                self._allow_workers(len(message.local_ranks))
            case m.CollectStacks():
                self._stacks += 1
            case m.ListLogs():
                self._listed = max(self._listed, len(message.ranks))
            case m.ReadLog():
                self._parts += 1
            case m.StdinData():
                self._stdin_unread += len(message.data)
            case _:
                pass
        self.allow(2)

    def _allow_workers(self, workers: int) -> None:
        self._workers = max(self._workers, workers)
        self.allow(_PER_WORKER * workers + _PER_START)

    def charge(self, message: Record, now: float) -> None:
        """Count a received message, except output and reports of read stdin.

        Raises ProtocolError if the number is used up, or if the node reports more stdin as read
        than it was sent.
        """
        match message:
            case m.Output() if self._has_greeted:
                return
            case m.StdinConsumed() if message.size > 0:
                self._stdin_unread -= message.size
                if self._stdin_unread < 0:
                    raise ProtocolError("it takes more of stdin than it was sent")
                if not message.closed:
                    return
            case m.Surveyed():
                self._surveys = max(0, self._surveys - 1)
            case m.Stacks():
                self._stacks = max(0, self._stacks - 1)
            case m.LogPart():
                self._parts = max(0, self._parts - 1)
            case _:
                pass
        super().charge(message, now)

    def size_of(self, name: str) -> FrameSize:
        """Return the largest size of a frame of the message type ``name`` at this moment.

        Before the node's first message, only messages that may come first are allowed.
        """
        if not self._has_greeted:
            if name == m.AgentEnding.__name__:
                return _TEXT
            return _FEW if name in (m.Hello.__name__, p.LauncherInfo.__name__) else _NONE
        row = _NODE_SIZES.get(name, _USUAL)
        size = row.object_bytes
        match name:
            case m.Surveyed.__name__ if self._surveys:
                return FrameSize(object_bytes=_SURVEY_BYTES, raw_bytes=0)
            case m.Stacks.__name__:
                if not self._stacks:
                    return _NONE
                size += min(_STACK_BYTES * self._workers, _STACKS_BYTES)
            case m.LogPart.__name__ if not self._parts:
                return _NONE
            case m.LogList.__name__:
                size += _LOG_INFO_BYTES * self._listed
            case WorkerExit.__name__ if not self._workers:
                return _NONE
            case m.Output.__name__ if not self._workers:
                return _USUAL
            case m.Alive.__name__:
                size += _HEARTBEAT_BYTES * self._workers
            case m.Usage.__name__:
                size += _USAGE_BYTES * self._workers
            case m.Started.__name__:
                size += _PID_BYTES * self._workers
            case m.Prepared.__name__:
                size += _PORT_BYTES * self._ports
            case _:
                pass
        return FrameSize(object_bytes=size, raw_bytes=row.raw_bytes)


class CoordinatorBudget(Budget):
    """The messages that a coordinator may send to a joined launcher."""

    def __init__(self, now: float) -> None:
        super().__init__(now, burst=_COORDINATOR_BURST, per_s=_COORDINATOR_PER_S)

    def size_of(self, name: str) -> FrameSize:
        """Return the largest size of a frame of the message type ``name``."""
        return _COORDINATOR_SIZES.get(name, _USUAL)
