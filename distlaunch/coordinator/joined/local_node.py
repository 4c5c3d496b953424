"""The agent of the launcher's own node, which runs in the launcher's process.

Used if each node has a launcher. The agent handles the same messages as a remote agent, except
those for output and stdin. Output goes directly to the log files, as in a job on one machine.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from distlaunch.core.agent.agent import Agent
from distlaunch.core.agent.node.reachability import ReachabilityTest
from distlaunch.core.agent.node.survey import (
    FILES_S,
    SurveyFunction,
    SurveyStep,
    make_answer,
    survey_node,
)
from distlaunch.core.agent.workers.channel import Channel
from distlaunch.core.agent.workers.output_pump import OutputSink
from distlaunch.core.model.record import replace
from distlaunch.core.model.topology import CpuInventory, GpuInventory
from distlaunch.core.probe.process_limits import explain_refusal
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol.spawner_messages import FromSpawner
from distlaunch.transport.open_files import original_limit

_MOST_THREADS = 16
"""How many surveys may hang at the same time."""
_HINT = "a file server or a driver there does not answer"

FromNode = m.FromAgent | m.Surveyed | m.Reached
"""The messages that a node sends."""


class LocalNode:
    """Handles the coordinator's messages for this node. ``receive`` returns the node's messages.

    ``nofile`` is the limit of open files for workers, unless this launcher has raised its own limit
    before. ``gpus`` and ``cpus`` were found during planning on this machine, so that no driver is
    queried twice.
    """

    def __init__(
        self,
        *,
        job_id: str,
        nofile: int,
        spawner: tuple[Channel[FromSpawner], int],
        sink: OutputSink,
        clock: Callable[[], float],
        gpus: GpuInventory,
        cpus: CpuInventory,
    ) -> None:
        self._clock = clock
        self._said: deque[FromNode] = deque()
        self._wake, self._wake_end = os.pipe()
        for descriptor in (self._wake, self._wake_end):
            os.set_blocking(descriptor, False)
        self._waking = threading.Lock()
        channel, pid = spawner
        self._agent = Agent(
            job_id=job_id,
            cookie=os.urandom(8).hex(),
            nofile=original_limit(nofile),
            channel=channel,
            watcher=pid,
            port=None,
            sink=sink,
            send=self._said.append,
            clock=clock,
        )
        self._reachability = ReachabilityTest(self._said.append, self._nudge)
        self._survey = _SurveyThreads(self._said.append, self._nudge, gpus=gpus, cpus=cpus)

    def start(self) -> None:
        """Start the agent. Raises ConfigError if no thread can be started."""
        self._agent.start()

    def handle(self, message: m.ToAgent | m.Survey | m.Reach) -> None:
        """Handle one message."""
        match message:
            case m.Survey():
                self._survey.begin(message)
            case m.Reach():
                self._reachability.begin(message)
            case _:
                self._agent.handle(message)

    @property
    def has_unsent(self) -> bool:
        """Whether messages to the spawner wait to be sent."""
        return any(wanted & select.POLLOUT for wanted in self._agent.descriptors().values())

    @property
    def is_broken(self) -> bool:
        """Whether the spawner has died.

        All workers have then been killed, and no ``AttemptEnded`` follows.
        """
        return self._agent.is_broken

    def descriptors(self) -> dict[int, int]:
        """Return the descriptors to poll, with the poll events."""
        return {
            self._wake: select.POLLIN,
            **self._agent.descriptors(),
            **self._reachability.descriptors(),
        }

    def deadline(self) -> float | None:
        """Return when ``receive`` is due even if nothing is ready, on the job's clock."""
        ahead = self._clock() - time.monotonic()
        others = (self._reachability.deadline(), self._survey.deadline())
        dues = [self._agent.deadline(), *(None if due is None else due + ahead for due in others)]
        return min((due for due in dues if due is not None), default=None)

    def receive(self) -> list[FromNode]:
        """Do what is due on the node, without waiting. Return the messages that the node sends."""
        with suppress(BlockingIOError):
            os.read(self._wake, 4096)
        self._survey.on_ready()
        self._reachability.on_ready()
        self._agent.on_ready()
        self._agent.tick()
        said = list(self._said)
        self._said.clear()
        return said

    def close(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """End the agent and all processes of its workers."""
        self._reachability.close()
        self._agent.close(hurried)
        with self._waking:  # a survey's thread may end later
            os.close(self._wake)
            os.close(self._wake_end)
            self._wake_end = -1

    def _nudge(self) -> None:
        with self._waking, suppress(BlockingIOError):
            if self._wake_end >= 0:
                os.write(self._wake_end, b"\0")


class _SurveyThreads:
    """Surveys the node in a thread, because a process with threads should not fork.

    A survey that hangs on a file server is abandoned, and the answer reports the problem.
    """

    def __init__(
        self,
        send: Callable[[m.Surveyed | m.AgentFailed], None],
        nudge: Callable[[], None],
        *,
        gpus: GpuInventory,
        cpus: CpuInventory,
        look: SurveyFunction = survey_node,
    ) -> None:
        self._send = send
        self._nudge = nudge
        self._gpus, self._cpus = gpus, cpus
        self._look = look
        self._threads: list[threading.Thread] = []
        self._order: m.Survey | None = None
        self._doing = SurveyStep(what="", bound_s=0.0)
        self._until = 0.0
        self._found: deque[tuple[m.Survey, m.Surveyed | m.AgentFailed]] = deque()

    def begin(self, order: m.Survey) -> None:
        """Begin a survey. The answer to a survey that is running is dropped.

        If too many threads hang, or no thread can be started, answer at once with the problem.
        """
        self._order = order

        def turn_to(what: str, bound_s: float, part: m.SurveyPart = "agent") -> None:
            if self._order is order:
                self._doing = SurveyStep(what=what, bound_s=bound_s, part=part)
                self._until = time.monotonic() + bound_s

        def look() -> None:
            found: m.Surveyed | m.AgentFailed
            try:
                found = self._look(replace(order, gpus=False, topology=False), turn_to)
            except Exception:  # noqa: BLE001 - whatever it is, the coordinator has to know
                import traceback

                found = m.AgentFailed(
                    text=f"the survey of the node failed\n{traceback.format_exc()}"
                )
            self._found.append((order, found))
            self._nudge()

        turn_to(f"the directory {order.workdir}", FILES_S, "directory")
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) >= _MOST_THREADS:
            self._answer(
                order,
                f"it has been asked {_MOST_THREADS} times, and each time something hangs",
                _HINT,
            )
            return
        thread = threading.Thread(target=look, name="survey", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._answer(order, "no thread can be started", explain_refusal())
        else:
            self._threads.append(thread)

    def deadline(self) -> float | None:
        """Return when the current step of the survey times out, in monotonic seconds; None if no
        survey runs."""
        return None if self._order is None else self._until

    def on_ready(self) -> None:
        """Send the result of the latest survey if it has finished. If its step has timed out,
        answer with the problem."""
        while self._found:
            order, found = self._found.popleft()
            if order is not self._order:
                continue
            self._order = None
            if isinstance(found, m.Surveyed):
                found = replace(found, gpus=self._gpus, cpus=self._cpus)
            self._send(found)
        order_now, doing = self._order, self._doing
        if order_now is not None and time.monotonic() >= self._until:
            problem = f"{doing.what} does not answer within {doing.bound_s:.0f} s"
            self._answer(order_now, problem, _HINT, doing.part)

    def _answer(
        self, order: m.Survey, problem: str, hint: str, part: m.SurveyPart = "agent"
    ) -> None:
        self._order = None
        self._send(
            make_answer(order, self._cpus, gpus=self._gpus, problem=problem, part=part, hint=hint)
        )
