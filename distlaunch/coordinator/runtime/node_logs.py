"""Read log files that are on the nodes of a running job, for ``logs`` in another shell.

A node gets one request at a time, and at most ``_REQUESTS_PER_S`` in a second, so that reading a large
log does not hold up its output. The policy does not see these messages.
"""

from __future__ import annotations

from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial

from distlaunch.coordinator.policy.attempt import AttemptNodes
from distlaunch.coordinator.policy.job_nodes import printable_short
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.run_files import STDERR, STDOUT
from distlaunch.core.protocol import agent_messages as m

ANSWER_S = 3.0
"""How long a node may take to answer one request."""
_REQUESTS_PER_S = 24.0
"""For one node. A joined launcher accepts 64 messages in a second."""
_PARTS_IN_FLIGHT = 4
"""``ReadLog`` requests to all nodes together."""
_MOST_OFFSET = 1 << 62
_NOT_CONNECTED = "it is not connected"
_SILENT = "it did not answer in time"
_ENDING = "the job has ended"


class NodeFiles(Record):
    """The log files of some ranks on one node."""

    node: int
    host: str
    ranks: tuple[int, ...]
    files: tuple[m.LogInfo, ...] = ()
    index_bytes: int = 0
    problem: str | None = None
    """Why they cannot be read, as a clause."""


class LogPlace(Record):
    """Where the nodes have the job's logs."""

    directory: str
    """As in ``ListLogs``."""
    log_bytes: int


class NodeLogs:
    """Asks the agents for log files. Used by the main loop alone. Times are on the job's clock."""

    def __init__(
        self,
        *,
        send: Callable[[int, m.ListLogs | m.ReadLog], None],
        clock: Callable[[], float],
        place: LogPlace,
        attempts: Mapping[int, AttemptNodes],
        is_connected: Callable[[int], bool],
    ) -> None:
        """Read logs of these attempts' nodes. ``is_connected`` returns whether a node can be
        asked."""
        self._send = send
        self._clock = clock
        self._place = place
        self._is_connected = is_connected
        self._serial = 0
        self._attempts = attempts
        self._waiting: dict[int, deque[_Request]] = {}
        """By node: requests that have not been sent."""
        self._sent: dict[int, _Request] = {}
        """By node: the request that it has not answered."""
        self._next_at: dict[int, float] = {}
        """By node: when it may get the next request."""

    # --- requests of other shells

    def list(self, attempt: int, ranks: Iterable[object]) -> Future[tuple[NodeFiles, ...]]:
        """Return a future of the log files of these ranks, by node.

        ``ranks`` has the first and the last rank of each range. Raises ConfigError.
        """
        known = self._nodes_of(attempt)
        wanted: set[int] = set()
        ranges = list(ranks)
        if len(ranges) > known.world_size:
            raise ConfigError(f"{len(ranges)} ranges of ranks are more than the job has ranks")
        for each in ranges:
            match each:
                case [int(first), int(last)]:
                    wanted.update(range(max(first, 0), min(last + 1, known.world_size)))
                case _:
                    raise ConfigError("a range of ranks is no pair of numbers")
        listing = _Listing(
            NodeFiles(node=node, host=known.host(node), ranks=chosen)
            for node in known.numbers
            if (chosen := tuple(rank for rank in known.ranks(node) if rank in wanted))
        )
        for node in listing.nodes:
            request = m.ListLogs(
                serial=0,
                attempt=attempt,
                ranks=listing.nodes[node].ranks,
                directory=self._place.directory,
                log_bytes=self._place.log_bytes,
            )
            self._ask(node, request, partial(listing.on_answer, node))
        return listing.future

    def read(
        self, attempt: int, rank: int, stream: int | None, offset: int, size: int
    ) -> Future[dict[str, str]]:
        """Return a future of a part of a rank's log, at most ``LOG_PART_BYTES`` long, in base64.

        ``stream`` is None for the index of times of the rank's node. Raises ConfigError.
        """
        known = self._nodes_of(attempt)
        node = next((each for each in known.numbers if rank in known.ranks(each)), None)
        if (
            node is None
            or not 0 <= offset < _MOST_OFFSET
            or size < 1
            or stream not in (None, *_STREAMS)
        ):
            raise ConfigError(f"attempt {attempt} has no such log of rank {rank}")
        future: Future[dict[str, str]] = Future()

        def on_part(answer: _Answer) -> None:
            if isinstance(answer, m.LogPart) and answer.problem is None:
                future.set_result({"data": b64encode(answer.data).decode("ascii")})
            else:
                future.set_exception(ConfigError(_problem(answer)))

        request = m.ReadLog(
            serial=0,
            attempt=attempt,
            rank=None if stream is None else rank,
            stream=stream or 0,
            offset=offset,
            size=min(size, m.LOG_PART_BYTES),
            directory=self._place.directory,
        )
        self._ask(node, request, on_part)
        return future

    def _nodes_of(self, attempt: int) -> AttemptNodes:
        known = self._attempts.get(attempt)
        if known is None:
            raise ConfigError(f"the launcher knows no nodes of attempt {attempt}")
        return known

    # --- the nodes

    def _ask(self, node: int, message: m.ListLogs | m.ReadLog, on_answer: _OnAnswer) -> None:
        if not self._is_connected(node):
            on_answer(_NOT_CONNECTED)
            return
        self._waiting.setdefault(node, deque()).append(_Request(message, on_answer))
        self._send_due()

    def _send_due(self) -> None:
        now = self._clock()
        for node, queue in list(self._waiting.items()):
            is_part = isinstance(queue[0].message, m.ReadLog)
            if (
                node in self._sent
                or now < self._next_at.get(node, now)
                or (is_part and not self._has_room())
            ):
                continue
            # Inserted again behind the others, which have waited longer.
            del self._waiting[node]
            request = queue.popleft()
            if queue:
                self._waiting[node] = queue
            self._serial += 1
            request.message = replace(request.message, serial=self._serial)
            request.until = now + ANSWER_S
            self._sent[node] = request
            self._next_at[node] = now + 1 / _REQUESTS_PER_S
            self._send(node, request.message)

    def _has_room(self) -> bool:
        """Return whether another part may be asked for."""
        parts = sum(isinstance(request.message, m.ReadLog) for request in self._sent.values())
        return parts < _PARTS_IN_FLIGHT

    def on_message(self, node: int, message: object) -> bool:
        """Handle an answer of a node. Return False for any other message.

        An answer that comes too late has no effect.
        """
        if not isinstance(message, (m.LogList, m.LogPart)):
            return False
        request = self._sent.get(node)
        if request is not None and request.message.serial == message.serial:
            del self._sent[node]
            request.on_answer(message)
            self._send_due()
        return True

    def on_lost(self, node: int) -> None:
        """Record that a node will not answer."""
        self._fail(node, _NOT_CONNECTED)

    def deadline(self) -> float | None:
        """Return when ``tick`` is due; None if no request is open."""
        dues = [request.until for request in self._sent.values()]
        if self._has_room():
            dues += [
                self._next_at.get(node, 0.0) for node in self._waiting if node not in self._sent
            ]
        return min(dues, default=None)

    def tick(self) -> None:
        """Answer for nodes that are late, and send requests that are due."""
        now = self._clock()
        for node in [node for node, request in self._sent.items() if now >= request.until]:
            self._fail(node, _SILENT)
        self._send_due()

    def close(self) -> None:
        """Answer the open requests with an error."""
        for node in {*self._sent, *self._waiting}:
            self._fail(node, _ENDING)

    def _fail(self, node: int, why: str) -> None:
        sent = self._sent.pop(node, None)
        waiting = self._waiting.pop(node, ())
        for request in (*([] if sent is None else [sent]), *waiting):
            request.on_answer(why)


_STREAMS = (0, STDOUT, STDERR)
_Answer = m.LogList | m.LogPart | str
"""An answer, or why there is none."""
_OnAnswer = Callable[[_Answer], None]


class _Request:
    def __init__(self, message: m.ListLogs | m.ReadLog, on_answer: _OnAnswer) -> None:
        self.message = message
        self.on_answer = on_answer
        self.until = 0.0


class _Listing:
    """Collects the answers of several nodes."""

    def __init__(self, asked: Iterable[NodeFiles]) -> None:
        self.future: Future[tuple[NodeFiles, ...]] = Future()
        self.nodes = {each.node: each for each in asked}
        self._unanswered = set(self.nodes)
        self._finish()

    def on_answer(self, node: int, answer: _Answer) -> None:
        """Record the answer of a node."""
        self.nodes[node] = _with_answer(self.nodes[node], answer)
        self._unanswered.discard(node)
        self._finish()

    def _finish(self) -> None:
        if not self._unanswered:
            self.future.set_result(tuple(self.nodes.values()))


def _with_answer(asked: NodeFiles, answer: _Answer) -> NodeFiles:
    """Return what a node says of the files that it was asked for, and nothing else."""
    if not isinstance(answer, m.LogList) or answer.problem is not None:
        return replace(asked, problem=_problem(answer))
    files = {
        (each.rank, each.stream): each
        for each in answer.files
        if each.rank in asked.ranks
        and each.stream in _STREAMS
        and each.size >= 0
        and -1 <= each.gap_begin <= each.size
        and each.left_out >= 0
    }
    return replace(asked, files=tuple(files.values()), index_bytes=max(0, answer.index_bytes))


def _problem(answer: _Answer) -> str:
    text = answer if isinstance(answer, str) else answer.problem
    return printable_short(text or "it gave another answer than it was asked for")
