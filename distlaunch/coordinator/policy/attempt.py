"""Record the nodes and the workers' events of one attempt, and judge why it failed. No I/O."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from distlaunch.coordinator.policy import failures
from distlaunch.coordinator.policy.advisory import Advisory, AdvisoryPart
from distlaunch.coordinator.policy.events_and_actions import LossKind, ReportFailure, ReportHang
from distlaunch.coordinator.policy.job_progress import Progress
from distlaunch.coordinator.policy.job_settings import PolicySettings
from distlaunch.coordinator.policy.restarts import Outcome
from distlaunch.core.errors import EXIT_HANG
from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from distlaunch.diagnosis.model import Diagnosis

if TYPE_CHECKING:
    from distlaunch.coordinator.policy.events_and_actions import AttemptPlan
    from distlaunch.coordinator.policy.losses import Loss
    from distlaunch.core.protocol.spawner_messages import Leftovers
    from distlaunch.diagnosis.hang import HangDiagnosis

CAUSE_S = 0.8
"""How long the other workers run on after a first failure that looks like a consequence, so that
its cause can appear."""
SAME_S = 0.15
"""How long the other workers run on after a failure with output on stderr, so that the same failure
on all ranks is reported as one."""
SHORT_TAIL_BYTES = 2048
"""Bytes at the end of a worker's stderr that distinguish a symptom from a cause."""
TAILS_KEPT = 256
"""Number of failed workers whose whole end of stderr is stored; of others ``SHORT_TAIL_BYTES``."""


class AttemptNodes(Record):
    """The nodes of an attempt, by node rank.

    Messages name a node by its node number, which is the same in all attempts.
    """

    numbers: tuple[int, ...]
    hosts: tuple[str, ...]
    first_ranks: tuple[int, ...]
    world_size: int
    node_ranks: Mapping[int, int]
    """The node rank of each node number."""
    attempt_plan: AttemptPlan | None = None

    @staticmethod
    def fixed(settings: PolicySettings) -> AttemptNodes:
        """Return the nodes named in the settings, for a job without a node setup."""
        numbers = tuple(range(len(settings.hosts)))
        return AttemptNodes(
            numbers=numbers,
            hosts=settings.hosts,
            first_ranks=settings.first_ranks,
            world_size=settings.world_size,
            node_ranks=dict(enumerate(numbers)),
        )

    @staticmethod
    def of(attempt_plan: AttemptPlan) -> AttemptNodes:
        """Return the nodes of a plan. Raise ValueError if it does not give each node its ranks."""
        plan, numbers, places = attempt_plan.plan, attempt_plan.node_numbers, attempt_plan.places
        world_size, first_ranks = plan.world_size, plan.first_ranks
        hosts = tuple(node.host for node in plan.nodes)
        if places is not None:
            hosts, first_ranks = (
                tuple(host for host, _ in places),
                tuple(rank for _, rank in places),
            )
        if world_size is None or not len(numbers) == len(hosts) == len(first_ranks):
            raise ValueError(
                f"a plan for {len(plan.nodes)} nodes does not settle the ranks of {len(numbers)} "
                "nodes"
            )
        return AttemptNodes(
            numbers=numbers,
            hosts=hosts,
            first_ranks=first_ranks,
            world_size=world_size,
            node_ranks={node: rank for rank, node in enumerate(numbers)},
            attempt_plan=attempt_plan,
        )

    def host(self, node: int) -> str:
        """Return the host of a node."""
        return self.hosts[self.node_ranks[node]]

    def host_of(self, rank: int) -> str:
        """Return the host of a worker."""
        from bisect import bisect_right

        return self.hosts[max(0, bisect_right(self.first_ranks, rank) - 1)]

    def first_rank(self, node: int) -> int:
        """Return a node's lowest rank."""
        return self.first_ranks[self.node_ranks[node]]

    def ranks(self, node: int) -> range:
        """Return a node's ranks."""
        node_rank = self.node_ranks[node]
        following = node_rank + 1
        end = self.first_ranks[following] if following < len(self.first_ranks) else self.world_size
        return range(self.first_ranks[node_rank], end)


class Verdict(Record):
    """The result of an attempt that failed or hung."""

    outcome: Outcome
    exit_code: int
    """The job's exit code if it ends with this attempt."""
    report: Callable[..., ReportFailure | ReportHang]
    by_loss: bool = False
    """The attempt failed only because nodes were lost."""


class Attempt:
    """One attempt, from the preparation of its nodes until none of its processes remains."""

    def __init__(self, number: int, nodes: AttemptNodes, *, began: float) -> None:
        self.number = number
        self.nodes = nodes
        self.began = began
        self.alive = set(nodes.numbers)
        """Nodes that have not been lost."""
        self.owing = set(nodes.numbers)
        """The live nodes that have not answered yet: Prepared, then Reached, then AttemptEnded."""
        self.ports: dict[int, tuple[int, ...]] = {}
        """By node: the ports for its workers."""
        self.port_used: bool | None = None
        """Whether a process has used rank 0's port, if known."""
        self.up = 0
        """Workers that have been started."""
        self.ended = 0
        self.failures: list[WorkerExit] = []
        self.finished: list[WorkerExit] = []
        """The first workers that ended with 0. A worker that waits for one of them fails."""
        self.losses: list[Loss] = []
        self.left: list[int] = []
        """Pids of processes that KILL did not end."""
        self.remaining: dict[int, Leftovers] = {}
        """By node: leftover processes whose end the node awaits."""
        self.ended_leftovers: dict[int, Leftovers] = {}
        """By node: leftover processes that it ended with TERM."""
        self.killed_leftovers: dict[int, Leftovers] = {}
        """By node: leftover processes that it killed."""
        self.notice_at: float | None = None
        """When to print the notice about leftovers for which the launcher waits."""
        self.has_notice = False
        self.is_cut_short = False
        """A signal ended the wait for leftover processes."""
        self.hang: HangDiagnosis | None = None
        self.first_failure: float | None = None
        self.others_until: float | None = None
        """How long the other workers may run on after the first failure."""
        self._seeks_cause = False
        """Whether the other workers may run on because the first failure looks like a
        consequence."""
        self.signs: dict[int, float] = {}
        """By rank: when it started or last wrote output, if nodes report output."""
        # By node: the ranks whose workers have started, with their pids.
        self._up: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._ended: defaultdict[int, set[int]] = defaultdict(set)
        self._lost: set[int] = set()  # ranks that ran when their node was lost
        self._done: dict[int, int] = {}  # number of workers that ended with 0, by node

    @property
    def is_full(self) -> bool:
        """Whether all workers have been started."""
        return self.up == self.nodes.world_size

    @property
    def has_ended(self) -> bool:
        """Whether all workers have ended."""
        return self.ended == self.nodes.world_size

    @property
    def went_well(self) -> bool:
        """Whether no worker failed, no node was lost, and nothing hung."""
        return not self.failures and not self.losses and self.hang is None

    @property
    def many_hosts(self) -> bool:
        """Whether messages must name the host."""
        return len(self.nodes.numbers) > 1

    def live_nodes(self) -> list[int]:
        """Return the nodes that have not been lost, by node rank."""
        if len(self.alive) == len(self.nodes.numbers):
            return list(self.nodes.numbers)
        return [node for node in self.nodes.numbers if node in self.alive]

    # --- its workers

    def pids(self, node: int) -> Mapping[int, int]:
        """Return the pids of the workers that a node has started, by rank."""
        return self._up.get(node, {})

    def returncodes(self) -> dict[int, int | None]:
        """Return how workers have ended, by rank; None if a worker ran when its node was lost."""
        codes: dict[int, int | None] = {
            rank: None if rank in self._lost else 0
            for ended in self._ended.values()
            for rank in ended
        }
        return codes | {end.rank: end.returncode for end in self.failures}

    def started(self, node: int, message: m.Started, now: float) -> None:
        """Record the workers that a node has started."""
        ranks, known = self.nodes.ranks(node), self._up[node]
        new = {
            rank: pid for rank, pid in message.pids.items() if rank in ranks and rank not in known
        }
        self.up += len(new)
        known.update(new)
        self.signs.update(dict.fromkeys(new, now))

    def is_news(self, node: int, rank: int) -> bool:
        """Return whether a node runs this worker and the end has not been recorded."""
        return rank in self.nodes.ranks(node) and rank not in self._ended[node]

    def exited(self, node: int, ended: WorkerExit) -> WorkerExit | None:
        """Record a worker's exit. Return it with host and local rank if it is a failure, else
        None."""
        self.ended += 1
        self._ended[node].add(ended.rank)
        if ended.returncode != 0:
            self.failures.append(self._placed(node, ended))
            return self.failures[-1]
        self._done[node] = self._done.get(node, 0) + 1
        if len(self.finished) < TAILS_KEPT:
            self.finished.append(self._placed(node, ended))
        return None

    def _placed(self, node: int, ended: WorkerExit) -> WorkerExit:
        """Return an exit with host and local rank. If many workers have failed, only a short end of
        the output stays."""
        whole = len(self.failures) < TAILS_KEPT
        return replace(
            ended,
            host=self.nodes.host(node),
            local_rank=ended.rank - self.nodes.first_rank(node),
            ended_s=ended.ended - self.began,
            stderr_tail=ended.stderr_tail if whole else ended.stderr_tail[-SHORT_TAIL_BYTES:],
            stdout_tail=ended.stdout_tail if whole else ended.stdout_tail[-SHORT_TAIL_BYTES:],
            error_file=ended.error_file if whole else None,
        )

    @property
    def seeks_cause(self) -> bool:
        """Whether the first failure looks like a consequence, and the others may run on."""
        return self._seeks_cause and self.others_until is not None

    def first_reaction(
        self, end: WorkerExit, now: float, advisory: Advisory
    ) -> Literal["stop", "wait", "go on"]:
        """Record the time of the first failure. Return the effect of a failure on the other
        workers.

        ``stop``: they are stopped now. ``wait``: they run until ``others_until``. ``go on``: such a
        wait has begun before and continues.
        """
        if self.first_failure is None:
            self.first_failure = now
            self._seeks_cause = _looks_like_consequence(end, advisory)
            wait_s = (
                CAUSE_S if self._seeks_cause else SAME_S if failures.may_be_shared(end) else 0.0
            )
            if wait_s and not self.has_ended:
                self.others_until = now + wait_s
                return "wait"
        elif self.others_until is not None and (
            not self._seeks_cause or _looks_like_consequence(end, advisory)
        ):
            return "go on"
        return "stop"

    # --- its nodes

    def unaccounted(self, node: int) -> list[int]:
        """Return a node's ranks whose end is not known."""
        ended = self._ended[node]
        return [rank for rank in self.nodes.ranks(node) if rank not in ended]

    def gone(self, node: int, message: m.AttemptEnded) -> None:
        """Record that no process remains on a node, and the leftovers that it ended."""
        if message.port_used is not None:
            self.port_used = message.port_used
        self.left += message.left
        self.owing.discard(node)
        if message.ended.count:
            self.ended_leftovers[node] = message.ended
        if message.killed.count:
            self.killed_leftovers[node] = message.killed

    def lost(
        self, node: int, why: str, now: float, *, exit_code: int, kind: LossKind
    ) -> Loss | None:
        """Record that a node is lost, with its workers.

        Return the loss; None if the attempt does not need the node any more: it has reported its
        end, or all its workers had ended with 0.
        """
        from distlaunch.coordinator.policy.losses import Loss

        owed = node in self.owing
        self.alive.discard(node)
        self.owing.discard(node)
        still = self._up[node].keys() - self._ended[node]
        self.ended += len(still)
        self._ended[node] |= still
        self._lost |= still
        ranks = self.nodes.ranks(node)
        if not owed or self._done.get(node, 0) == len(ranks):
            return None
        host = self.nodes.host(node)
        ended_s = now - self.began
        loss = Loss(
            node=node,
            host=host,
            why=why,
            ranks=tuple(ranks),
            ended_s=ended_s,
            exit_code=exit_code,
            kind=kind,
        )
        self.losses.append(loss)
        return loss

    # --- its end

    def judge(
        self,
        settings: PolicySettings,
        progress: Progress,
        *,
        lived_s: float,
        is_stopped: bool,
        port: int | None,
        stacks: Sequence[m.Stack] = (),
        advisory: Advisory,
    ) -> Verdict:
        """Return the verdict on an attempt that failed or hung.

        ``lived_s``: seconds until it hung, if it did. ``is_stopped``: a signal ended the job.
        ``port``: rank 0's. ``stacks``: those of the workers at the first failure. ``advisory``
        guards the search for the first cause; without it, the report has the exits of the workers.
        """
        has_advanced, world_size = progress.has_advanced(), self.nodes.world_size
        after_grace = None if is_stopped else failures.after_grace(settings)
        if self.hang is not None:
            outcome = Outcome.after(
                self.hang.signature,
                lived_s,
                min_uptime_s=settings.min_uptime_s,
                has_advanced=has_advanced,
            )
            killed = tuple(
                sorted(end.rank for end in self.failures if end.returncode == -signal.SIGKILL)
            )
            hung = partial(
                ReportHang,
                diagnosis=self.hang,
                killed=killed,
                after_grace=after_grace,
                leftovers=self.killed_text(after_grace),
                dead_threads=advisory.call(
                    AdvisoryPart.FIRST_CAUSE, (), failures.exceptions_of_threads, self.failures
                ),
                written=advisory.call(
                    AdvisoryPart.FIRST_CAUSE,
                    (),
                    failures.what_ranks_wrote,
                    self.failures,
                    self.hang.behind,
                ),
                attempt=self.number,
            )
            return Verdict(outcome=outcome, exit_code=EXIT_HANG, report=hung)
        ends = [*self.failures, *self.finished]
        find = partial(
            failures.diagnose,
            ends,
            settings,
            world_size=world_size,
            after_grace=after_grace,
            master_port=port,
            stacks=stacks,
        )
        found = advisory.call(AdvisoryPart.FIRST_CAUSE, None, find)
        diagnosis = failures.exits_alone(ends) if found is None else found
        if self.losses:
            from distlaunch.coordinator.policy import losses

            if not advisory.call(
                AdvisoryPart.FIRST_CAUSE,
                False,  # noqa: FBT003 - the result after a fault
                losses.explains,
                diagnosis,
                self.failures,
                self.losses,
            ):
                others = advisory.call(
                    AdvisoryPart.FIRST_CAUSE,
                    (),
                    failures.doing,
                    ends,
                    world_size=world_size,
                    after_grace=after_grace,
                )
                may_have_bounds = settings.node_setup is None or settings.node_setup.may_have_bounds
                diagnosis = losses.diagnosis_of(
                    self.losses, others, latest=progress.latest, may_have_bounds=may_have_bounds
                )
                diagnosis = self._with_killed(diagnosis, after_grace)
                lived_s = self.losses[0].ended_s
                outcome = Outcome.after(
                    None, lived_s, min_uptime_s=settings.min_uptime_s, has_advanced=has_advanced
                )
                report = partial(ReportFailure, diagnosis=diagnosis, attempt=self.number)
                return Verdict(
                    outcome=outcome, exit_code=diagnosis.exit_code, report=report, by_loss=True
                )
            diagnosis = losses.with_losses(diagnosis, self.losses)
        diagnosis = self._with_killed(diagnosis, after_grace)
        outcome = Outcome.of(
            diagnosis, self.failures, min_uptime_s=settings.min_uptime_s, has_advanced=has_advanced
        )
        report = partial(ReportFailure, diagnosis=diagnosis, attempt=self.number)
        return Verdict(outcome=outcome, exit_code=diagnosis.exit_code, report=report)

    def killed_text(self, after_grace: str | None = None) -> str | None:
        """Return a text about the killed leftover processes, if there are any."""
        if not self.killed_leftovers:
            return None
        from distlaunch.coordinator.policy.remaining_processes import killed_text

        return killed_text(
            self.by_host(self.killed_leftovers), many_hosts=self.many_hosts, after_grace=after_grace
        )

    def _with_killed(self, diagnosis: Diagnosis, after_grace: str | None) -> Diagnosis:
        killed = self.killed_text(after_grace)
        return (
            diagnosis if killed is None else replace(diagnosis, others=(*diagnosis.others, killed))
        )

    def by_host(self, found: Mapping[int, Leftovers]) -> dict[str, Leftovers]:
        """Return leftover processes by host, in the order of the node ranks. ``found`` has them by
        node."""
        return {self.nodes.host(node): found[node] for node in self.nodes.numbers if node in found}


def _looks_like_consequence(end: WorkerExit, advisory: Advisory) -> bool:
    return advisory.call(
        AdvisoryPart.FIRST_CAUSE,
        False,  # noqa: FBT003 - the result after a fault
        failures.looks_like_consequence,
        end,
    )
