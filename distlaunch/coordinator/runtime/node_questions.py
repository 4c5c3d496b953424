"""Ask the nodes of a running job, for commands in other shells, for usage and for stacks.

The main loop asks the agents, and each question is answered when all nodes have sent their answers,
or after a time limit. The policy does not see these messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from distlaunch.coordinator.runtime.main_loop_calls import MainLoopClosedError
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record, replace
from distlaunch.core.protocol import agent_messages as m

USAGE_S = 3.0
"""How long the nodes may take to send their usage."""
STACKS_S = 4.0
"""How long the nodes may take to send their stacks."""
NATIVE_STACKS_S = 12.0
"""The same with native frames."""
_REUSE_S = 0.9
"""An answer about the usage serves further questions for this long. It is shorter than the time
between two questions of ``top --once``, which needs two answers for rates."""

Answer = m.Usage | m.Stacks


class NodeAnswer(Record):
    """The answer of one node. One of ``usage`` and ``stacks`` is None."""

    node: int
    host: str
    usage: m.Usage | None = None
    stacks: tuple[m.Stack, ...] | None = None


class Answers(Record):
    """The answers to one question."""

    attempt: int
    nodes: tuple[NodeAnswer, ...]
    unanswered: tuple[str, ...]
    """The hosts of the nodes that did not answer in time."""
    script_dir: str = ""
    """Files below it are the user's own."""


class AskedNodes(Record):
    """The nodes that a question goes to."""

    attempt: int
    hosts: dict[int, str]
    """By the number of the node."""
    first_shown: int = 0
    """The rank by which people know the job's rank 0."""
    script_dir: str = ""


class NodeQuestions:
    """Asks the agents, and collects their answers. Used by the main loop alone."""

    def __init__(
        self,
        *,
        send: Callable[[int, m.ReadUsage | m.CollectStacks], None],
        clock: Callable[[], float],
    ) -> None:
        self._send = send
        self._clock = clock
        self._serial = 0
        """Serial numbers are negative: those of hang detection are positive."""
        self._open: dict[int, _Question] = {}
        self._latest_usage: tuple[float, Answers] | None = None

    def ask_usage(self, nodes: AskedNodes) -> Future[Answers]:
        """Return a future that will have what the nodes and their workers use.

        An answer of the last ``_REUSE_S`` is used again. Raises ConfigError if no worker runs.
        """
        latest = self._latest_usage
        if latest is not None and self._clock() < latest[0] and latest[1].attempt == nodes.attempt:
            future: Future[Answers] = Future()
            future.set_result(latest[1])
            return future
        return self._ask(nodes, m.ReadUsage, USAGE_S)

    def ask_stacks(self, nodes: AskedNodes, *, native: bool = False) -> Future[Answers]:
        """Return a future that will have the stacks of all running workers.

        An open question of the same kind is joined. ``native``: with native frames, if py-spy is
        installed on the node. Raises ConfigError if no worker runs.
        """
        bound_s = NATIVE_STACKS_S if native else STACKS_S
        return self._ask(nodes, m.CollectStacks, bound_s, for_user=True, native=native)

    def _ask(
        self,
        nodes: AskedNodes,
        kind: type[m.ReadUsage | m.CollectStacks],
        bound_s: float,
        **fields: bool,
    ) -> Future[Answers]:
        if not nodes.hosts:
            raise ConfigError("no worker runs now")
        future: Future[Answers] = Future()
        for question in self._open.values():
            if (question.kind, question.fields, question.nodes.attempt) == (
                kind,
                fields,
                nodes.attempt,
            ):
                question.futures.append(future)
                return future
        self._serial -= 1
        question = _Question(kind, fields, nodes, self._clock() + bound_s, future)
        self._open[self._serial] = question
        for node in nodes.hosts:
            self._send(node, kind(attempt=nodes.attempt, serial=self._serial, **fields))
        return future

    def on_message(self, node: int, message: object) -> bool:
        """Record an answer to a question of this class. Return False for other messages, including
        answers to hang detection."""
        if not isinstance(message, (m.Usage, m.Stacks)) or message.serial >= 0:
            return False
        question = self._open.get(message.serial)
        if question is not None and node in question.nodes.hosts:
            question.answers[node] = message
            self._finish_if_complete(message.serial)
        return True

    def on_lost(self, node: int) -> None:
        """Record that a node will not answer."""
        for serial, question in list(self._open.items()):
            question.lost.add(node)
            self._finish_if_complete(serial)

    def deadline(self) -> float | None:
        """Return when ``tick`` is due; None if no question is open."""
        return min((question.until for question in self._open.values()), default=None)

    def tick(self) -> None:
        """Set the results of questions whose time is over, with the answers that have arrived."""
        now = self._clock()
        for serial, question in list(self._open.items()):
            if now >= question.until:
                self._finish(serial)

    def close(self) -> None:
        """Fail the open questions with MainLoopClosedError."""
        while self._open:
            _, question = self._open.popitem()
            for future in question.futures:
                future.set_exception(MainLoopClosedError())

    def _finish_if_complete(self, serial: int) -> None:
        question = self._open[serial]
        if question.nodes.hosts.keys() <= question.answers.keys() | question.lost:
            self._finish(serial)

    def _finish(self, serial: int) -> None:
        question = self._open.pop(serial)
        answers = question.result()
        if question.kind is m.ReadUsage:
            self._latest_usage = self._clock() + _REUSE_S, answers
        for future in question.futures:
            future.set_result(answers)


class _Question:
    def __init__(
        self,
        kind: type[m.ReadUsage | m.CollectStacks],
        fields: dict[str, bool],
        nodes: AskedNodes,
        until: float,
        future: Future[Answers],
    ) -> None:
        self.kind = kind
        self.fields = fields
        self.nodes = nodes
        self.until = until
        self.futures = [future]
        self.answers: dict[int, Answer] = {}
        self.lost: set[int] = set()

    def result(self) -> Answers:
        hosts, first = self.nodes.hosts, self.nodes.first_shown
        return Answers(
            attempt=self.nodes.attempt,
            script_dir=self.nodes.script_dir,
            nodes=tuple(
                _node_answer(node, hosts[node], self.answers[node], first)
                for node in hosts
                if node in self.answers
            ),
            unanswered=tuple(host for node, host in hosts.items() if node not in self.answers),
        )


def _node_answer(node: int, host: str, answer: Answer, first: int) -> NodeAnswer:
    if isinstance(answer, m.Usage):
        usage = replace(answer, workers=_with_shown_ranks(answer.workers, first))
        return NodeAnswer(node=node, host=host, usage=usage)
    return NodeAnswer(node=node, host=host, stacks=_with_shown_ranks(answer.stacks, first))


def _with_shown_ranks(parts: Iterable[Any], first: int) -> tuple[Any, ...]:
    """Return the parts with the ranks by which people know them."""
    return tuple(replace(part, rank=part.rank + first) if first else part for part in parts)
