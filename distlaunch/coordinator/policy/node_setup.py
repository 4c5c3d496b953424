"""Connect and survey the nodes of an attempt, and plan for those that can take part. No I/O.

A job of fixed size waits for all its nodes, and reports all failures together. A job that may run
on fewer nodes, or has spares, waits ``ELASTIC_WAIT_S`` for the remaining ones once enough are
connected, but not for a node that it has just lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from operator import attrgetter

from distlaunch.coordinator.policy import job_nodes
from distlaunch.coordinator.policy.events_and_actions import (
    Action,
    AttemptPlan,
    Connect,
    Disconnect,
    Discover,
    Discovered,
    JobError,
    LossKind,
    PlanAttempt,
    RecordEvent,
    SendToNode,
    ShowMessage,
)
from distlaunch.coordinator.policy.job_nodes import JobNode, JobNodes
from distlaunch.coordinator.policy.job_settings import NodeSetupSettings
from distlaunch.core.errors import EXIT_USAGE, LaunchError, NodesError
from distlaunch.core.model.host_list import name_hosts
from distlaunch.core.model.record import fields_of
from distlaunch.core.protocol.agent_messages import Survey, Surveyed
from distlaunch.transport.connect_errors import ConnectFailure

ELASTIC_WAIT_S = 10.0
"""How long a job with enough nodes waits for the remaining ones."""
LOOK_AGAIN_S = 0.5
LOOK_S, LATER_LOOK_S = 5.0, 60.0
"""How long a node that lacks something, or differs from the others, is surveyed again: NFS caches
are outdated for a while. A job that has run waits for the second time, because its script may have
been edited."""
DISCOVER_S = 30.0
"""Period of running --discover while the job has too few nodes."""
WAITING_S = 5.0
"""Time after which the user gets a notice with the missing nodes."""
_LATE_SHOWN = 8
"""Largest number of nodes that connect between two attempts and are named."""


class NodeSetup:
    """Sets up the nodes of each attempt. Between attempts, tracks which nodes could take part in
    the next."""

    def __init__(self, settings: NodeSetupSettings, *, failure_grace_s: float) -> None:
        self._settings = settings
        self._attempt_plans = AttemptPlanCache(settings.plan_attempt)
        self.nodes = JobNodes(
            settings.hosts, flexible=settings.flexible, failure_grace_s=failure_grace_s
        )
        self.active = False
        self.left: str | None = None
        """The nodes that left the previous attempt, with reasons, until the user has been
        notified."""
        self._first = True
        self._until = 0.0
        self._hope_until: float | None = None
        """Until when failed connections are retried. None: until the join timeout."""
        self._late = 0
        self._extended = False
        self._enough_since: float | None = None
        self._in: set[int] = set()
        """Nodes that have been surveyed and can take part."""
        self._unanswered: set[int] = set()
        """Nodes that may still join this attempt and have not answered the survey."""
        self._retrying: set[int] = set()
        """Unreachable nodes that are tried again."""
        self._failed: set[int] = set()
        """Nodes that cannot take part in this attempt."""
        self._present = 0
        self._serial = 0
        self._question: Survey | None = None
        self._too_few = 0
        self._why_few: JobError | None = None
        """Why there is no plan for ``_too_few`` nodes."""
        self._again: deque[tuple[float, int]] = deque()
        """When to survey which node again."""
        self._odd_since: dict[int, float] = {}
        self._differ_since: float | None = None
        self._look_s = LOOK_S
        self._discover_at: float | None = None
        self._discovery_until: float | None = None
        self._said_problem: str | None = None
        self._unreported: set[int] = set()
        """Lost nodes of which the user has not been notified."""
        self._left_out: set[int] = set()
        """Nodes that the user knows to be the same machine as another one."""
        self._waiting_at: float | None = None

    # --- one attempt after the other

    def begin(self, now: float, *, fresh: bool) -> list[Action]:
        """Begin to connect and survey the nodes for an attempt. Return the actions that follow.

        ``fresh`` is False if the previous setup started no workers and is repeated. The time limit
        starts anew in a fresh setup and in its first repetition.
        """
        settings = self._settings
        self.active = True
        if fresh or not self._extended:
            self._until = now + settings.join_timeout_s
        self._extended = not fresh
        retry_timeout_s = (
            settings.retry_timeout_s if self._first and not settings.flexible else None
        )
        self._hope_until = None if retry_timeout_s is None else now + retry_timeout_s
        self._enough_since = self._differ_since = self._why_few = None
        self._too_few = 0
        for names in (self._in, self._unanswered, self._retrying, self._failed):
            names.clear()
        self._again.clear()
        self._odd_since.clear()
        self._waiting_at = now + WAITING_S
        self._late = 0
        self._ask_anew()
        actions: list[Action] = []
        if settings.discover and not self._first:
            actions.append(Discover())
            self._discovery_until = now + ELASTIC_WAIT_S
        self._discover_at = now + DISCOVER_S if settings.discover else None
        self._look_s = LOOK_S if self._first else LATER_LOOK_S
        actions += [
            action
            for node in self.nodes.all_nodes
            if not node.present
            for action in self.nodes.leave(node)
        ]
        present = self.nodes.present()
        self._present = len(present)
        short = sum(node.state == "joined" for node in present) < settings.bounds[0]
        return actions + [
            action for node in present for action in self._include(node, now, short=short)
        ]

    def _include(self, node: JobNode, now: float, *, short: bool) -> list[Action]:
        """Ask a connected node for its survey, and connect to another one.

        A node that is being connected counts as missing only if the job is ``short`` of nodes.
        """
        if node.state == "joined":
            return self._ask(node)
        if node.state != "connecting":
            self._unanswered.add(node.number)
            if not self._extended:
                self._until = max(self._until, node.free_at + ELASTIC_WAIT_S)
        elif not short:
            return []  # the node was lost or not reached, so nothing waits for its answer
        elif node.cools_until > now:
            self._retrying.add(node.number)
            self._until = max(self._until, node.cools_until + self._settings.join_timeout_s)
            return []
        else:
            self._unanswered.add(node.number)
        return [self.nodes.connect(node, now)]

    def settle(self, now: float) -> AttemptPlan | JobError | None:
        """Return the nodes and the plan of the attempt, or the error that it cannot start.

        Return None while this is not decided.
        """
        if not self.active or (
            self._discovery_until is not None and now < min(self._discovery_until, self._until)
        ):
            return None
        (fewest, most), inside = self._settings.bounds, len(self._in)
        if inside < (needed := max(fewest, self._too_few + 1)):
            self._enough_since = None
            possible = self._settings.discover or self._present - len(self._failed) >= needed
            if (self._unanswered or possible) and now < self._until:
                return None
            return self._why_few or self._refuse()
        if self._enough_since is None:
            self._enough_since = now
        if self._unanswered or self._retrying:
            over = now >= min(self._enough_since + ELASTIC_WAIT_S, self._until)
            if not over and not (inside >= most and self._has_first(most)):
                return None
        return self._plan_attempt(now)

    def _has_first(self, count: int) -> bool:
        """Return whether the first ``count`` hosts are connected, so that no spare is needed."""
        for node in self.nodes.all_nodes:
            if node.present:
                if node.number not in self._in:
                    return False
                count -= 1
                if not count:
                    return True
        return False

    def _plan_attempt(self, now: float) -> AttemptPlan | JobError | None:
        surveys: dict[int, Surveyed] = {}
        if (twice := self._twins()) is not None:
            first, second = twice
            text = f"{first.host} and {second.host} are one machine"
            hint = f"name it once, with as many workers as it is to run: {first.host}:N"
            return JobError(exit_code=EXIT_USAGE, message=text, hints=(hint,))
        for number in sorted(self._in):
            surveyed = self.nodes[number].surveyed
            if surveyed is not None:
                surveys[number] = surveyed
        try:
            attempt_plan = self._attempt_plans(surveys)
        except LaunchError as exc:
            from distlaunch.planning.surveyed_nodes import NodesDifferError

            differing = exc.nodes if isinstance(exc, NodesDifferError) else ()
            if isinstance(exc, NodesError) and now < self._until and len(surveys) < self._present:
                self._too_few, self._why_few = len(surveys), JobError.of(exc)
                return self.settle(now)
            if self._differ_since is None:
                self._differ_since = now
            if not differing or now >= self._differ_since + self._look_s:
                return JobError.of(exc)
            self._enough_since = None
            self._until = max(self._until, self._differ_since + self._look_s)
            for number in differing:
                self._look_again(number, now)
            return None
        self.active = self._first = False
        return attempt_plan

    def deadline(self) -> float:
        """Return when ``tick`` is due."""
        times = [self._until, self._discovery_until, self._discover_at, self._waiting_at]
        if self._retrying:
            times.append(self._hope_until)
        if self._enough_since is not None and (self._unanswered or self._retrying):
            times.append(self._enough_since + ELASTIC_WAIT_S)
        if self._again:
            times.append(self._again[0][0])
        return min(time for time in times if time is not None)

    def tick(self, now: float) -> list[Action]:
        """Return the actions that are due. Call ``settle`` afterwards."""
        if not self.active:
            return []
        actions: list[Action] = []
        if self._again and now >= self._again[0][0]:
            self._ask_anew()
            while self._again and now >= self._again[0][0]:
                node = self.nodes[self._again.popleft()[1]]
                if node.state == "joined" and node.number in self._unanswered:
                    actions += self._ask(node)
        if self._discovery_until is not None and now >= self._discovery_until:
            self._discovery_until = None
        if self._discover_at is not None and now >= self._discover_at:
            self._discover_at = now + DISCOVER_S
            actions.append(Discover())
        if self._is_hopeless(now):
            self._failed |= self._retrying
            self._retrying.clear()
        if self._waiting_at is not None and now >= self._waiting_at:
            self._waiting_at = None
            actions += self._waiting_notice(now)
        return actions

    def _is_hopeless(self, now: float) -> bool:
        return self._hope_until is not None and now >= self._hope_until

    def _waiting_notice(self, now: float) -> list[Action]:
        missing = [node for node in self.nodes.present() if node.state != "joined"]
        until = self._until
        if self._enough_since is not None and self._settings.flexible:
            until = min(until, self._enough_since + ELASTIC_WAIT_S)
        if not missing or until - now < 1.0:
            return []
        left = self.left
        self.on_losses_reported()
        within_s = None if self._hope_until is not None else until - now
        return job_nodes.waiting(
            missing,
            here=self.here(),
            present=self._present,
            within_s=within_s,
            left=left,
            launchers=self._settings.launchers,
        )

    def absent(self, count: int) -> list[JobNode]:
        """Return the nodes without which an attempt with ``count`` nodes starts.

        A node that is only late is none of them if the attempt has its full size.
        """
        late = self._unanswered if count < self._settings.bounds[1] else set()
        return [self.nodes[number] for number in sorted(late | self._retrying | self._failed)]

    def here(self) -> int:
        """Return the number of connected nodes."""
        return sum(node.present and node.state == "joined" for node in self.nodes.all_nodes)

    def on_losses_reported(self) -> None:
        """Record that the user has been notified which nodes left."""
        self.left = None
        self._unreported.clear()

    # --- what happens to nodes

    def logged_in(self, number: int) -> None:
        """Record that the login on a node has succeeded, and that its agent is being started."""
        self.nodes[number].logged_in = self.nodes[number].state == "connecting"

    def joined(self, number: int, now: float) -> list[Action]:
        """Record that the agent of a node has connected. Return the actions that follow, such as
        its survey."""
        node = self.nodes[number]
        if not node.present:  # its host was removed while it connected
            self.nodes.leave(node)
            return [Disconnect(node=number)]
        actions: list[Action] = []
        if node.why_lost is not None or not self.active:
            self._late += 1
            how = "has come" if node.why_lost is None else "is back"
            if number in self._unreported:
                how = f"left ({node.why_lost}) and is back"
                self._unreported.discard(number)
            text = (
                f"node {node.host} "
                f"{how}{'' if self.active else ', and may take part from the next attempt on'}"
            )
            if self._late <= _LATE_SHOWN:  # a warning reaches all launchers
                actions.append(
                    ShowMessage(text=text, level="warning" if self._settings.launchers else "info")
                )
        actions += self.nodes.joined(node)
        if self.active:
            self._forget(number)
            actions += self._ask(node)
        return actions

    def unreachable(self, number: int, failure: ConnectFailure, now: float) -> list[Action]:
        """Record that node ``number`` could not be reached. Return the actions that follow, such as
        another attempt to connect."""
        node = self.nodes[number]
        if node.state != "connecting":
            return []
        awaited = self.active and (number in self._unanswered or number in self._retrying)
        actions = self.nodes.unreachable(node, failure)
        if awaited:
            self._forget(number)
            final = not failure.passing or self._is_hopeless(now)
            (self._failed if final else self._retrying).add(number)
            if final and not self._settings.flexible:
                node.state = "lost"
                return actions
        return [*actions, self.nodes.connect_again(node, now, needed=awaited)]

    def lost(
        self, number: int, why: str, now: float, *, reconnect: bool, kind: LossKind = LossKind.GONE
    ) -> list[Action]:
        """Record that a connected node is lost. Return the actions that follow; none if it was not
        connected.

        ``reconnect``: the job still runs, so the node may be connected again. False while the job
        is being stopped, or after it has failed.
        """
        node = self.nodes[number]
        if node.state != "joined":
            return []
        actions = self.nodes.lost(node, why, now, kind)
        self._unreported.add(number)
        if not reconnect:
            return [action for action in actions if not isinstance(action, Connect)]
        if self.active:
            self._forget(number)
            if kind is LossKind.ODD and not self._settings.flexible:
                self._failed.add(number)  # the same agent would send the same again
            elif not self._settings.flexible:
                self._retrying.add(number)
                actions.append(self.nodes.connect(node, now))
        return actions

    def discovered(self, event: Discovered, now: float) -> list[Action]:
        """Record the hosts that --discover has found. Return the actions that follow."""
        self._discovery_until = None
        if event.hosts is None:
            last, self._said_problem = self._said_problem, event.problem
            text = f"hosts were not found anew, those known stay: {event.problem}"
            return [] if last == event.problem else [ShowMessage(text=text, level="warning")]
        self._said_problem = None
        self._attempt_plans.forget()
        come, gone = self.nodes.discovered(event.hosts)
        self._present += len(come) - len(gone)
        actions: list[Action] = []
        if come or gone:
            words = [(f"{name_hosts(each.host for each in come)} came", come)]
            words.append((f"{name_hosts(each.host for each in gone)} went away", gone))
            actions.append(
                ShowMessage(text="hosts: " + ", ".join(text for text, those in words if those))
            )
            fields = {
                "came": [each.host for each in come[:64]],
                "went": [each.host for each in gone[:64]],
            }
            actions.append(RecordEvent(type="hosts_discovered", fields=fields))
        for node in come:
            if node.state == "joined":
                actions += self._ask(node) if self.active else []
                continue
            if self.active:
                self._unanswered.add(node.number)
            actions.append(self.nodes.connect(node, now))
        if self.active:
            for node in gone:
                self._forget(node.number)
                actions += self.nodes.leave(node)
        return actions

    # --- surveys

    def _ask_anew(self) -> None:
        """Create a new survey, whose serial number shows late answers to the previous one."""
        self._serial += 1
        self._question = self._settings.survey(self._serial)

    def _ask(self, node: JobNode) -> list[Action]:
        if self._question is None:
            return []
        node.serial = self._question.serial
        self._unanswered.add(node.number)
        return [SendToNode(node=node.number, message=self._question)]

    def surveyed(self, number: int, answer: Surveyed, now: float) -> list[Action]:
        """Record the survey of node ``number``. Return the actions that follow.

        A late answer is ignored. An obstacle to workers counts only if it lasts: see ``LOOK_S``.
        """
        node = self.nodes[number]
        if not self.active or node.state != "joined" or answer.serial != node.serial:
            return []
        node.serial = 0
        obstacle = (
            job_nodes.obstacle(node.host, self._question, answer)
            if self._question is not None
            else None
        )
        if obstacle is None:
            self._forget(number)
            self._odd_since.pop(number, None)
            node.surveyed, node.failure = answer, None
            self._in.add(number)
            return self._leave_out_twin()
        if now < self._odd_since.setdefault(number, now) + self._look_s:
            self._look_again(number, now)
            return []
        self._forget(number)
        self._failed.add(number)
        return self.nodes.unreachable(node, obstacle)

    def _look_again(self, number: int, now: float) -> None:
        self._forget(number)
        self._unanswered.add(number)
        self._again.append((now + LOOK_AGAIN_S, number))

    def _leave_out_twin(self) -> list[Action]:
        """Leave out the second of two hosts that are the same machine, if the job may run on fewer
        nodes."""
        if not self._settings.flexible or (twice := self._twins()) is None:
            return []
        first, second = twice
        self._forget(second.number)
        self._failed.add(second.number)
        second.surveyed = None
        text = f"it is the same machine as {first.host}"
        failure = ConnectFailure(host=second.host, step="agent", text=text, passing=False)
        actions = self.nodes.unreachable(second, failure)
        if second.number not in self._left_out:
            self._left_out.add(second.number)
            actions.append(ShowMessage(text=f"{second.host} is left out: {text}", level="warning"))
        return actions

    def _twins(self) -> tuple[JobNode, JobNode] | None:
        """Return two nodes that are the same machine, if any."""
        if not self._settings.named_once:
            return None
        return job_nodes.same_machine([self.nodes[number] for number in sorted(self._in)])

    def _forget(self, number: int) -> None:
        """Remove a node from all sets of this attempt."""
        for names in (self._in, self._unanswered, self._retrying, self._failed):
            names.discard(number)

    # --- too few nodes

    def _refuse(self) -> JobError:
        missing = [node for node in self.nodes.present() if node.number not in self._in]
        settings, inside = self._settings, [self.nodes[number] for number in sorted(self._in)]
        return job_nodes.too_few(settings, inside, missing, present=self._present)


_answers = attrgetter(*(field for field in fields_of(Surveyed) if field != "serial"))


class AttemptPlanCache:
    """A ``PlanAttempt`` function that returns its last plan while the surveys do not change."""

    def __init__(self, plan_attempt: PlanAttempt) -> None:
        self._plan_attempt = plan_attempt
        self._surveys: Mapping[int, Surveyed] = {}
        self._attempt_plan: AttemptPlan | None = None

    def __call__(self, surveys: Mapping[int, Surveyed]) -> AttemptPlan:
        """Return the plan for the surveyed nodes. Raises the errors of the wrapped
        ``PlanAttempt``."""
        known = self._attempt_plan
        if known is not None and self._is_same(surveys):
            return known
        self._attempt_plan = None
        self._attempt_plan = self._plan_attempt(surveys)
        self._surveys = surveys
        return self._attempt_plan

    def _is_same(self, surveys: Mapping[int, Surveyed]) -> bool:
        before = self._surveys
        return before.keys() == surveys.keys() and all(
            _answers(before[number]) == _answers(surveyed) for number, surveyed in surveys.items()
        )

    def forget(self) -> None:
        """Drop the last plan, because the hosts have changed."""
        self._attempt_plan = None
