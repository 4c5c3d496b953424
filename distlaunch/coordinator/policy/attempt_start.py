"""Choose the nodes and the master address of each attempt on several nodes. No I/O.

``AttemptStart`` lives as long as the job, ``Preparation`` for one attempt: rank 0's node reserves
the master port, and every other node tries to connect to it at each address. Workers get an address
that all nodes have reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from distlaunch.coordinator.policy.attempt import AttemptNodes
from distlaunch.coordinator.policy.events_and_actions import (
    Action,
    Disconnect,
    Discovered,
    JobError,
    Joined,
    LossKind,
    Lost,
    RecordEvent,
    SendToNode,
    ShowMessage,
    Unreachable,
)
from distlaunch.coordinator.policy.job_nodes import printable_short
from distlaunch.coordinator.policy.job_settings import NodeSetupSettings, PolicySettings
from distlaunch.coordinator.policy.losses import Loss, hint_of_transport, who_left
from distlaunch.coordinator.policy.node_setup import NodeSetup
from distlaunch.core.errors import EXIT_UNAVAILABLE, LaunchError
from distlaunch.core.model.host_list import fold_hosts, name_hosts
from distlaunch.core.model.text import counted
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol.agent_messages import Reach, Reached, Surveyed
from distlaunch.planning.master_address import MasterChoice

_RECORDED = 64
"""Largest number of hosts or ranks in one event."""
_NOTICES = 200
"""Largest number of different notices from nodes that a job shows. Thousands of nodes may each send
one."""
REACH_S = 5.0
"""How long nodes may take to connect to the node of rank 0."""
PREPARE_S = 60.0
"""How long nodes may take to prepare, including up to 30 s for GPU memory."""
SLACK_S = 5.0


class AttemptStart:
    """Chooses and prepares the nodes of each attempt."""

    def __init__(self, settings: NodeSetupSettings, policy: PolicySettings) -> None:
        self._settings = settings
        self._port, self._worker_ports = policy.master_port, policy.worker_ports
        self._node_setup = NodeSetup(settings, failure_grace_s=policy.failure_grace_s)
        self._preparation: Preparation | None = None
        self._before: AttemptNodes | None = None
        self._said: set[str] = set()
        self.is_cut_off = False
        """Whether no node can be reached any longer. Only Ray reports this; its jobs have a fixed
        size."""

    def deadline(self) -> float:
        """Return when ``tick`` is due, or when the answer of a node times out."""
        return (
            self._preparation.deadline()
            if self._preparation is not None
            else self._node_setup.deadline()
        )

    def tick(self, now: float) -> list[Action]:
        """Return the actions that are due while nodes connect."""
        return self._node_setup.tick(now)

    # --- which nodes take part

    def begin(self, now: float, *, fresh: bool) -> list[Action]:
        """Begin to connect nodes for an attempt. Return the actions that follow.

        ``fresh`` is False if the previous preparation of this attempt failed; see
        ``NodeSetup.begin``.
        """
        self._preparation = None
        return self._node_setup.begin(now, fresh=fresh)

    def settle(
        self, attempt: int, now: float
    ) -> tuple[AttemptNodes, list[Action]] | JobError | None:
        """Return the nodes of the attempt with the actions to prepare it, or the error that it
        cannot start.

        Return None while this is not decided.
        """
        found = self._node_setup.settle(now)
        if found is None or isinstance(found, JobError):
            return found
        nodes, before = AttemptNodes.of(found), self._before
        self._before = nodes
        hosts = printable_short(fold_hosts(nodes.hosts))
        fields = {
            "attempt": attempt,
            "nodes": len(nodes.hosts),
            "world_size": nodes.world_size,
            "hosts": hosts,
        }
        actions: list[Action] = [RecordEvent(type="composed", fields=fields)]
        if before is not None and (
            self._node_setup.left is not None or nodes.numbers != before.numbers
        ):
            known = set(before.numbers)
            new = [
                host
                for node, host in zip(nodes.numbers, nodes.hosts, strict=True)
                if node not in known
            ]
            joined = f"; new: {name_hosts(new)}" if new else ""
            left = f"{self._node_setup.left}; " if self._node_setup.left is not None else ""
            text = (
                f"{left}going on with {len(nodes.numbers)} of {self._settings.bounds[1]} "
                f"nodes{joined}"
            )
            actions.append(ShowMessage(text=text, level="warning" if left else "info"))
        self._node_setup.on_losses_reported()
        if absent := self._node_setup.absent(len(nodes.numbers)):
            failure = absent[0].failure
            why = (
                "it did not come in time" if failure is None else f"{failure.step}: {failure.text}"
            )
            others = f" and {counted(len(absent) - 1, 'other')}" if absent[1:] else ""
            actions.append(
                ShowMessage(text=f"without {absent[0].host} ({why}){others}", level="warning")
            )
        return nodes, actions

    def note(self, losses: Sequence[Loss]) -> None:
        """Store which nodes were lost, and why, instead of what was stored before. The next notice
        about nodes names them."""
        self._node_setup.left = who_left(losses)

    def replaces(self) -> bool:
        """Return whether the job continues without a lost node, which is no restart."""
        fewest, most = self._settings.bounds
        return fewest < most or (self._settings.flexible and self._node_setup.here() >= fewest)

    def can_spare(self, number: int) -> bool:
        """Return whether the job can continue with ``number`` nodes fewer than are connected."""
        return self.replaces() and self._node_setup.here() - number >= self._settings.bounds[0]

    # --- what happens to nodes

    def logged_in(self, node: int) -> None:
        """Record that the login on a node has succeeded."""
        self._node_setup.logged_in(node)

    def joined(self, event: Joined, now: float) -> list[Action]:
        """Record that the agent of a node has connected. Return the actions that follow."""
        if event.host is not None:
            self._node_setup.nodes[event.node].host = event.host
        return self._node_setup.joined(event.node, now)

    def unreachable(self, event: Unreachable, now: float) -> list[Action]:
        """Record that a node could not be reached. Return the actions that follow."""
        return self._node_setup.unreachable(event.node, event.failure, now)

    def discovered(self, event: Discovered, now: float) -> list[Action]:
        """Record the hosts that --discover has found. Return the actions that follow."""
        return self._node_setup.discovered(event, now)

    def surveyed(self, node: int, message: Surveyed, now: float) -> list[Action]:
        """Record the survey of a node. Return the actions that follow."""
        return self._node_setup.surveyed(node, message, now)

    def lost(
        self, event: Lost, run: tuple[int, Sequence[int]] | None, now: float, *, reconnect: bool
    ) -> list[Action]:
        """Record a lost node. Return the actions that follow; none if the node was not connected.

        ``run``: the attempt in which the node took part, and its ranks. ``reconnect``: the job
        still runs, so the node may be connected again.
        """
        self.is_cut_off = self.is_cut_off or event.final
        node, why = self._node_setup.nodes[event.node], printable_short(event.why)
        if node.state != "joined":
            return []
        fields: dict[str, object] = {"node": event.node, "host": node.host, "why": why}
        if run is not None:
            fields |= {"attempt": run[0], "ranks": list(run[1][:_RECORDED])}
        return [
            RecordEvent(type="node_lost", fields=fields),
            *self._node_setup.lost(
                event.node, why, now, reconnect=reconnect and not self.is_cut_off, kind=event.kind
            ),
        ]

    def continue_without(self, unusable: Sequence[tuple[int, str]], now: float) -> list[Action]:
        """Drop nodes, each with the reason, and warn the user. Return the actions.

        The caller has checked that the job can spare the nodes.
        """
        hosts = name_hosts(self.host(node) for node, _ in unusable)
        nodes = "node" if len(unusable) == 1 else "nodes"
        text = f"{nodes} {hosts} left out: {printable_short(unusable[0][1])}"
        actions: list[Action] = [ShowMessage(text=text, level="warning")]
        for node, why in unusable:
            actions += self.lost(Lost(node=node, why=why), None, now, reconnect=True)
        return actions

    @staticmethod
    def leave(node: int) -> Action:
        """Return the action that disconnects a node that is no longer needed."""
        return Disconnect(node=node)

    @staticmethod
    def refuse(event: Lost) -> JobError:
        """Return the error that no node can be reached any longer."""
        hint = hint_of_transport(event.kind)
        return JobError(
            exit_code=EXIT_UNAVAILABLE,
            message=printable_short(event.why),
            hints=(hint,) if hint else (),
        )

    def host(self, node: int) -> str:
        """Return the name of a node's host."""
        return self._node_setup.nodes[node].host

    def is_connected(self, node: int) -> bool:
        """Return whether a node is connected, even if it takes no part in the attempt."""
        return self._node_setup.nodes[node].state == "joined"

    def why_lost(self, node: int) -> str:
        """Return the reason for the loss of a node, as a clause."""
        return self._node_setup.nodes[node].why_lost or ""

    def kind_lost(self, node: int) -> LossKind:
        """Return the kind of the loss of a node."""
        return self._node_setup.nodes[node].kind_lost

    def notice(self, node: int, text: str) -> str | None:
        """Return a node's notice with its host, unless the text was shown before, or ``_NOTICES``
        others."""
        if text in self._said or len(self._said) >= _NOTICES:
            return None
        self._said.add(text)
        return self.quote(node, text)

    def quote(self, node: int, text: str) -> str:
        """Return ``text`` from a node, with its host."""
        return f"{self.host(node)}: {printable_short(text)}"

    # --- preparing

    def prepare(self, nodes: AttemptNodes, attempt: int, now: float) -> list[Action]:
        """Return the actions that ask the participating nodes to prepare."""
        surveys = [
            surveyed
            for node in nodes.numbers
            if (surveyed := self._node_setup.nodes[node].surveyed)
        ]
        self._preparation = Preparation(self._settings, nodes, attempt, surveys, now)
        return self._preparation.begin(self._port, worker_ports=self._worker_ports)

    @property
    def reaches(self) -> bool:
        """Whether all nodes have prepared and now connect to rank 0's node."""
        return self._preparation is not None and self._preparation.reaches

    def reach(self, port: int, now: float) -> list[Action] | JobError:
        """Return the actions that make the other nodes connect to rank 0's node, or the error that
        it has no usable address."""
        return [] if self._preparation is None else self._preparation.reach(port, now)

    def reached(self, node: int, message: Reached) -> None:
        """Record which addresses of rank 0's node a node has reached."""
        if self._preparation is not None:
            self._preparation.reached(node, message)

    def late(self, owing: set[int]) -> JobError | None:
        """Record that these nodes are late. Return the error if the job cannot continue."""
        return None if self._preparation is None else self._preparation.late(owing)

    def choose_master(self, now: float) -> MasterChoice | JobError | list[Action]:
        """Return the master address, or the error that no address was reached by all nodes.

        If the job can spare the nodes that cannot reach rank 0's node, return the actions to
        continue without them. Return an empty list if no attempt is being prepared.
        """
        preparation = self._preparation
        if preparation is None:
            return []
        unusable = preparation.unconnected(self.can_spare)
        return self.continue_without(unusable, now) if unusable else preparation.choose_master()


class Preparation:
    """Prepares one planned attempt, until its workers can be started."""

    def __init__(
        self,
        settings: NodeSetupSettings,
        nodes: AttemptNodes,
        attempt: int,
        surveys: Sequence[Surveyed],
        now: float,
    ) -> None:
        self._settings = settings
        self._nodes = nodes
        self._attempt = attempt
        self._surveys = surveys
        self._token = settings.token(attempt) if len(nodes.numbers) > 1 else ""
        self._reached: dict[int, Reached] = {}
        self._until = now + PREPARE_S
        self.reaches = False
        """All nodes have prepared and now connect to rank 0's node."""

    def begin(self, port: int, *, worker_ports: int) -> list[Action]:
        """Return the actions that make all nodes prepare. ``worker_ports``: ports to reserve for
        each worker."""
        first, nodes = self._nodes.numbers[0], self._nodes
        return [
            SendToNode(
                node=node,
                message=m.Prepare(
                    attempt=self._attempt,
                    port=port if node == first else None,
                    token=self._token if node == first else "",
                    ports=worker_ports * len(nodes.ranks(node)),
                ),
            )
            for node in nodes.numbers
        ]

    def deadline(self) -> float:
        """Return when the current step (prepare or reach) times out."""
        return self._until

    def reach(self, port: int, now: float) -> list[Action] | JobError:
        """Return the actions that make the other nodes connect to rank 0's node, or the error that
        it has no usable address."""
        nodes = self._nodes
        self.reaches = True
        self._until = now + REACH_S + SLACK_S
        try:
            addresses = self._settings.addresses(self._surveys[0], nodes.hosts[0])
        except LaunchError as exc:
            return JobError.of(exc)
        question = Reach(
            attempt=self._attempt,
            addresses=addresses,
            port=port,
            token=self._token,
            bound_s=REACH_S,
        )
        return [SendToNode(node=node, message=question) for node in nodes.numbers[1:]]

    def reached(self, node: int, message: Reached) -> None:
        """Record which addresses of rank 0's node a node has reached."""
        self._reached[self._nodes.node_ranks[node]] = message

    def late(self, owing: Iterable[int]) -> JobError | None:
        """Record that these nodes are late. Return the error if the job cannot continue.

        Nodes that had to connect to rank 0's node are recorded as unable to reach it.
        """
        if self.reaches:
            problem = f"no answer within {REACH_S + SLACK_S:g} s"
            for node in owing:
                self.reached(node, Reached(attempt=self._attempt, routes=(), problem=problem))
            return None
        late = sorted(owing)
        text = f"{counted(len(late), 'node')} did not prepare within {PREPARE_S:g} s: "
        return JobError(
            exit_code=EXIT_UNAVAILABLE, message=text + name_hosts(map(self._nodes.host, late))
        )

    def unconnected(self, can_spare: Callable[[int], bool]) -> list[tuple[int, str]]:
        """Return the nodes that cannot reach rank 0's node, each with the reason.

        Return an empty list if the job cannot continue without them. ``can_spare`` returns whether
        the job can continue without a number of nodes.
        """
        lost = [
            (self._nodes.numbers[rank], answer.problem or "it has no way to rank 0's node")
            for rank, answer in self._reached.items()
            if not answer.routes
        ]
        return lost if len(lost) < len(self._reached) and can_spare(len(lost)) else []

    def choose_master(self) -> MasterChoice | JobError:
        """Return the master address after all nodes have tried to connect, or an error if none was
        reached by all."""
        try:
            return self._settings.choose_master(self._surveys, self._reached)
        except LaunchError as exc:
            return JobError.of(exc)
