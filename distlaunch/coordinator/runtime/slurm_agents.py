"""The agents that srun has started. What Slurm does to the agents is reported as events."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Any

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.coordinator.runtime.connections import NodeConnection
from distlaunch.coordinator.runtime.remote_agents import RemoteAgents
from distlaunch.coordinator.runtime.signal_pipe import ENDING
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.transport.slurm.nodes import SrunConnector

_ENDED_WITH = "Slurm ended it, as an agent of the same step had ended"
_MOST_SAID = 40
_MANNERS = re.compile(
    r"got SIGCONT|forcing job termination|Job step aborted: Waiting|Force Terminated|_step_signal"
)
"""Lines of srun about itself that are not shown."""


class SlurmAgents(RemoteAgents):
    """Connections to agents that ``srun`` has started.

    ``signals_all``: Slurm's signals reach the workers as well as the agents.
    """

    reports_signals = True

    def __init__(self, *args: Any, srun: SrunConnector, signals_all: bool, **kwargs: Any) -> None:
        super().__init__(*args, open_connection=srun.open, **kwargs)
        self._srun = srun
        self._signals_all = signals_all
        self._said: deque[str] = deque()
        self._much = 0
        self._busy: set[int] = set()
        """Nodes on which an attempt has not ended."""
        self._doomed: set[int] = set()
        """Nodes whose agents Slurm is about to kill. Each is lost once its workers have ended."""
        self._leaving = False
        srun.say = self._on_line

    def _on_line(self, line: str) -> None:
        """Queue a line that srun has printed. Called by srun's thread."""
        self._said.append(line)
        self._notify()

    def receive(self) -> list[a.Event]:
        """Return the events since the last call, including lines that srun has printed.

        Lines of srun about itself are left out, also all after the first 40 and those at the end of
        the job.
        """
        while self._said:
            line = self._said.popleft()
            self._much += 1
            if self._much <= _MOST_SAID and not self._leaving and not _MANNERS.search(line):
                self._events.append(a.LinePrinted(text=line))
        return super().receive()

    def send(self, node: int, message: m.ToRemote | p.StartWorkers) -> None:
        """Send a message to a node. A message to a lost node is dropped."""
        if isinstance(message, m.Start):
            self._busy.add(node)
        super().send(node, message)

    def _on_message(
        self, node_connection: NodeConnection[m.FromRemote], message: m.FromRemote
    ) -> None:
        """Handle a message, and what it shows of Slurm's plans.

        If Slurm ends the step, a signal to an agent is no signal to the job: the node is lost once
        its attempt has ended.
        """
        node = node_connection.node
        if isinstance(message, m.SpawnerSignalled) and self._srun.is_ending(
            self.targets[node].host
        ):
            return  # its agent reports it as well
        if isinstance(message, m.AgentSignalled) and node_connection.greeted:
            self._message_checks[node].check(message)
            if message.signum not in ENDING or not self._srun.is_ending(self.targets[node].host):
                event = a.Signalled(signum=message.signum, node=node, reached=self._signals_all)
                self._events.append(event)
            elif node in self._busy:
                self._doomed.add(node)
            else:
                self._lose(node_connection, _ENDED_WITH)
            return
        super()._on_message(node_connection, message)
        if isinstance(message, m.AttemptEnded):
            self._busy.discard(node)
            if node in self._doomed:
                self._lose(node_connection, _ENDED_WITH)

    def _lose(
        self,
        node_connection: NodeConnection[m.FromRemote],
        why: str,
        kind: a.LossKind = a.LossKind.GONE,
    ) -> None:
        if node_connection.greeted:
            self._srun.on_agent_lost(self.targets[node_connection.node].host)
        super()._lose(node_connection, why, kind)

    def _drop(self, node_connection: NodeConnection[m.FromRemote]) -> None:
        self._busy.discard(node_connection.node)
        self._doomed.discard(node_connection.node)
        super()._drop(node_connection)

    def close(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """End all agents, then close srun. ``hurried`` returns True if the user wants a quick
        end."""
        self._leaving = True
        super().close(hurried)
        self._srun.close()
