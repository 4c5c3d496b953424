from __future__ import annotations

import signal
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.coordinator.policy import events_and_actions as p
from distlaunch.coordinator.policy.restarts import Final, FinalReason
from distlaunch.core.model.record import replace
from distlaunch.core.protocol import agent_messages as m
from tests.examples import examples

TOLD = (-15, 143, 0, 1, -9)


class World:
    """Random agents and a random user that obey the protocol."""

    def __init__(self, job, data) -> None:
        self.job = job
        self.data = data
        self.signals = 0
        self.signum: int | None = None
        self.late: int | None = None
        """The first signal that came when all workers had ended."""
        self.owes_prepared: set[int] = set()
        self.to_start: list[int] = []
        self.running: list[int] = []
        self.owes_gone: set[int] = set()
        self.reported: set[int] = set()
        self.failed: list[int] = []  # exit codes, as a shell would have them, of all attempts
        self.attempt = 0

    def act(self, actions) -> None:
        for action in actions:
            match action:
                case p.SendToNode(message=m.Prepare() as prepare):
                    assert not self.running
                    assert not self.to_start
                    assert not self.owes_gone
                    self.attempt = prepare.attempt
                    self.owes_prepared.add(action.node)
                case p.StartAttempt():
                    assert not self.owes_prepared
                    assert action.attempt == self.attempt
                    self.to_start = list(self.job.ranks)
                    self.owes_gone = set(range(self.job.nodes))
                    self.reported = set()
                case p.SendToNode(message=m.Stop() as stop):
                    assert stop.attempt == self.attempt
                    self.reported.add(action.node)

    def choices(self) -> list[str]:
        can = []
        if self.owes_prepared:
            can += ["prepared"] * 3
        if self.to_start:
            can += ["started"] * 3
        if self.running:
            can += ["exited"] * 2
        if any(self.is_empty(node) for node in self.owes_gone):
            can += ["gone"]
        if self.job.policy.deadline() is not None:
            can += ["tick"]
        if self.signals < 3:
            can += ["signal"]
        return can

    def is_empty(self, node: int) -> bool:
        return all(rank // self.job.per_node != node for rank in [*self.to_start, *self.running])

    def pick(self, among) -> int:
        return self.data.draw(st.sampled_from(sorted(among)))

    def go_on(self) -> None:
        job = self.job
        job.now += self.data.draw(st.sampled_from([0.0, 0.05, 0.5, 3.0]))
        match self.data.draw(st.sampled_from(self.choices())):
            case "prepared":
                node = self.pick(self.owes_prepared)
                self.owes_prepared.discard(node)
                self.act(job.prepared(node))
            case "started":
                rank = self.to_start.pop(0)
                self.running.append(rank)
                self.act(job.started(rank))
            case "exited":
                self.exit(self.pick(self.running))
            case "gone":
                node = self.pick(node for node in self.owes_gone if self.is_empty(node))
                self.owes_gone.discard(node)
                self.act(job.gone(node))
            case "tick":
                job.now = max(job.now, job.policy.deadline())
                self.act(job.tick())
            case "signal":
                self.signals += 1
                signum = self.data.draw(
                    st.sampled_from([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
                )
                all_ended = bool(self.owes_gone) and not (self.running or self.to_start)
                if signum != signal.SIGUSR1 and self.signum is None and all_ended:
                    self.late = self.late or signum
                elif signum != signal.SIGUSR1 and self.signum is None:
                    self.signum = signum
                self.act(job.signal(signum))

    def exit(self, rank: int) -> None:
        job = self.job
        reported = rank // job.per_node in self.reported
        if reported:
            returncode, tail = self.data.draw(st.sampled_from(TOLD)), b""
        else:
            returncode, tail = self.data.draw(
                st.sampled_from([(0, b""), (0, b""), (1, job.RAISED), (7, job.LOST), (-11, b"")])
            )
        if returncode:
            self.failed.append(returncode if returncode > 0 else 128 - returncode)
        self.running.remove(rank)
        self.act(
            job.exited(
                rank,
                returncode,
                tail=tail,
                reported=reported,
                uptime_s=self.data.draw(st.sampled_from([1.0, 60.0])),
            )
        )


@given(
    data=st.data(),
    nodes=st.integers(1, 3),
    per_node=st.integers(1, 2),
    max_restarts=st.integers(0, 2),
    scheduler=st.booleans(),
)
@settings(max_examples=examples(40), deadline=None)
def test_the_job_ends_once_and_as_promised_for_any_events(
    make_job, data, nodes, per_node, max_restarts, scheduler
):
    job = make_job(nodes, per_node, max_restarts=max_restarts, repeated_term_kills=not scheduler)
    world = World(job, data)
    world.act(job.begin())
    for _ in range(60 * (max_restarts + 1)):
        if job.exit_code is not None:
            break
        assert world.choices(), (
            f"stuck in phase {job.phase}: nobody owes anything and no deadline is set"
        )
        world.go_on()
    assert job.exit_code is not None

    kinds = [type(action) for action in job.actions]
    assert kinds[-1] is p.EndJob
    starts = [start.attempt for start in job.of(p.StartAttempt)]
    assert starts == list(range(len(starts)))
    assert len(starts) <= max_restarts + 1
    assert [failed.final for failed in job.of(p.ReportFailure)[:-1]] == [False] * max(
        0, len(job.of(p.ReportFailure)) - 1
    )
    if world.signum is not None:
        assert job.exit_code == 128 + world.signum
    elif world.late is not None and job.exit_code == 128 + world.late:
        decision = job.of(p.ReportFailure)[-1].decision
        assert decision == Final(reason=FinalReason.STOPPED), "there would have been a restart"
    elif job.exit_code:
        assert job.exit_code in world.failed
        assert job.of(p.ReportFailure)[-1].final
    else:
        assert len(job.of(p.ReportFailure)) == job.attempt, (
            "0 only after an attempt in which nobody failed"
        )


@given(
    order=st.permutations(range(6)),
    returncodes=st.lists(st.sampled_from([0, 0, 1, 3, -9]), min_size=6, max_size=6),
)
@settings(max_examples=examples(30), deadline=None)
def test_all_are_asked_to_stop_exactly_once_and_only_if_somebody_failed(
    make_job, order, returncodes
):
    job = make_job(nodes=3, per_node=2).run()
    for rank in order:
        job.exited(rank, returncodes[rank])
    stops = Counter(node for node, _ in job.sent(m.Stop))
    assert stops == (Counter(range(3)) if any(returncodes) else Counter())
    job.all_gone()
    assert (job.exit_code == 0) == (not any(returncodes))


# --- scale


def work_of_a_restart(make_job, nodes: int, per_node: int) -> tuple[int, int]:
    """Start, fail once, stop, restart. Return the number of actions, and the steps of Python's own
    loops."""
    job = make_job(nodes, per_node, max_restarts=1)
    touched = 0

    class Counted(tuple):
        __slots__ = ()

        def __iter__(self):
            nonlocal touched
            touched += len(self)
            return super().__iter__()

        def __len__(self) -> int:
            nonlocal touched
            touched += 1
            return super().__len__()

    nodes = job.policy._run.nodes
    job.policy._run.nodes = replace(
        nodes, numbers=Counted(nodes.numbers), hosts=Counted(nodes.hosts)
    )
    job.run()
    job.fail()
    job.come_up()
    assert (job.attempt, job.phase) == (1, "running")
    return len(job.actions), touched


def test_work_grows_with_the_job_and_not_with_its_square(make_job):
    small_actions, small_touched = work_of_a_restart(make_job, 128, 8)
    large_actions, large_touched = work_of_a_restart(make_job, 256, 8)
    assert large_actions <= 2 * small_actions
    assert large_touched <= 2 * small_touched + 16, "some event walks over all nodes"


def test_a_job_of_131072_workers_starts_fails_and_restarts(make_job):
    nodes, per_node = 16_384, 8
    job = make_job(nodes, per_node, max_restarts=1, master_port=29500)
    job.begin()
    for node in range(nodes):
        job.prepared(node)
    for node in range(nodes):
        first = node * per_node
        job.say(
            node, m.Started(attempt=0, pids={rank: rank for rank in range(first, first + per_node)})
        )
    assert (job.phase, job.policy.up) == ("running", nodes * per_node)
    job.actions.clear()
    assert len(job.sent(m.Stop, job.exited(77_777, 1))) == nodes
    for rank in job.ranks:
        if rank != 77_777:
            job.exited(rank, -15, reported=True)
    assert len(job.actions) == nodes * per_node + nodes, "one entry per exit, one stop per node"
    job.actions.clear()
    job.all_gone()
    [failed] = job.of(p.ReportFailure)
    assert failed.diagnosis.cause.ranks == (77_777,)
    assert failed.diagnosis.cause.host == f"node{77_777 // per_node}"
    assert len(job.sent(m.Prepare)) == nodes
    assert len(job.actions) == nodes + 2
