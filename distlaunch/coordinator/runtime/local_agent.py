"""The agent of this machine in the launcher's process. It uses the messages of a remote agent."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from distlaunch.coordinator.policy.events_and_actions import Event, FromNode
from distlaunch.core.agent.agent import Agent
from distlaunch.core.agent.node.ports import HeldPort
from distlaunch.core.agent.workers.channel import Channel
from distlaunch.core.agent.workers.output_pump import OutputSink
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol.codec import Decoder, encode
from distlaunch.core.protocol.spawner_messages import FromSpawner

if TYPE_CHECKING:
    from distlaunch.core.protocol import launcher_messages as p


class LocalTransport:
    """Exchanges encoded messages with the agent in this process, as over a socket.

    Output bytes are passed on without being encoded.
    """

    def __init__(
        self,
        *,
        job_id: str,
        cookie: str,
        nofile: int,
        spawner: tuple[Channel[FromSpawner], int],
        sink: OutputSink,
        clock: Callable[[], float],
        port: HeldPort | None = None,
    ) -> None:
        self._to_agent: Decoder[m.ToAgent] = Decoder(m.TO_AGENT, m.NESTED_TYPES)
        self._from_agent: Decoder[m.FromAgent] = Decoder(m.FROM_AGENT, m.NESTED_TYPES)
        self._received: deque[m.FromAgent] = deque()
        channel, pid = spawner
        self._agent = Agent(
            job_id=job_id,
            port=port,
            cookie=cookie,
            nofile=nofile,
            channel=channel,
            watcher=pid,
            sink=sink,
            send=self._receive_from_agent,
            clock=clock,
        )

    def start(self) -> None:
        """Start the agent."""
        self._agent.start()

    def discover(self) -> None:
        """Do nothing: a local job has only one node."""

    def send(self, node: int, message: m.ToAgent | m.Survey | m.Reach | p.StartWorkers) -> None:
        """Pass a message to the agent. ``node`` is always 0."""
        del node
        for received in self._to_agent.feed(encode(message)):
            self._agent.handle(received)

    def broadcast(self, message: m.ToAgent) -> None:
        """Pass a message to the agent."""
        self.send(0, message)

    @property
    def has_unsent(self) -> bool:
        """Whether messages from the agent to its spawner wait to be sent."""
        return any(wanted & select.POLLOUT for wanted in self.descriptors().values())

    def _receive_from_agent(self, message: m.FromAgent) -> None:
        self._received.extend(self._from_agent.feed(encode(message)))

    def descriptors(self) -> dict[int, int]:
        """Return the descriptors to poll, with the poll events."""
        return self._agent.descriptors()

    def deadline(self) -> float | None:
        """Return when ``receive`` is due even if nothing is ready."""
        return self._agent.deadline()

    def receive(self) -> list[Event]:
        """Let the agent do what is due, without waiting. Return its messages as events."""
        self._agent.on_ready()
        self._agent.tick()
        received: list[Event] = [FromNode(node=0, message=message) for message in self._received]
        self._received.clear()
        return received

    def connect(self, node: int, delay_s: float) -> None:
        """Do nothing: there is no connection."""

    def disconnect(self, node: int) -> None:
        """Do nothing: the agent is closed with the transport."""

    def close(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """End the agent and all processes of its workers."""
        self._agent.close(hurried)
