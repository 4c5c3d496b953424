"""Nodes that come, go, hang and come back in any order."""

from __future__ import annotations

import signal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distlaunch.coordinator.policy import events_and_actions as p
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from tests.examples import examples

# Some hundred histories each, on a machine that others may use.
pytestmark = pytest.mark.timeout(400)

STEPS = 120
"""Of mischief; from then on everybody behaves."""
ENOUGH = 3000


class Node:
    """One agent, as long as its connection lasts."""

    def __init__(self) -> None:
        self.serial = 0  # of the survey that it owes
        self.prepares: int | None = None
        self.reaches: int | None = None
        self.attempt: int | None = None  # whose workers it has
        self.to_start: list[int] = []
        self.running: list[int] = []
        self.reported = False


class World:
    """Agents, workers and the user; ``draw`` chooses what happens next."""

    def __init__(self, job, data) -> None:
        self.job = job
        self.data = data
        self.wild = True
        self.pending: set[int] = set()  # nodes that are being connected
        self.up: dict[int, Node] = {}
        self.discovers = 0
        self.signum: int | None = None
        self.late: int | None = None
        """The first signal that came when all workers had ended, some of them wrongly."""
        self.succeeded = False
        """A signal came when all workers had ended with 0: it can change the exit code no more."""
        self.signals = 0
        self.most_signals = max(0, data.draw(st.integers(0, 9)) - 6)
        self.prepared: set[int] = set()  # for the attempt that is to come
        self.codes: dict[int, int] = {}  # of the newest attempt's ranks
        self.failed: set[int] = set()
        self.starts: list[int] = []
        self.notices: list[tuple[int, object]] = []  # what agents have sent, for late copies

    # --- the policy's actions

    def act(self, actions) -> None:
        for action in actions:
            match action:
                case p.Connect():
                    assert 0 <= action.node < len(self.job.names)
                    self.up.pop(action.node, None)
                    self.pending.add(action.node)
                case p.Disconnect():
                    self.up.pop(action.node, None)
                    self.pending.discard(action.node)
                case p.Discover():
                    self.discovers += 1
                case p.SendToNode() if action.node in self.up:
                    self.reported(self.up[action.node], action.node, action.message)
                case p.StartAttempt():
                    self.start(action)

    def reported(self, node: Node, number: int, message) -> None:
        match message:
            case m.Survey():
                node.serial = message.serial
            case m.Prepare():
                assert node.attempt is None, "workers of the attempt before are left"
                node.prepares = message.attempt
                self.prepared.discard(number)
            case m.Reach():
                assert message.token == f"word{message.attempt}"
                node.reaches = message.attempt
            case m.Stop() if message.attempt == node.attempt:
                node.reported = True

    def start(self, action: p.StartAttempt) -> None:
        node_numbers = action.attempt_plan.node_numbers
        assert len(set(node_numbers)) == len(node_numbers)
        assert self.job.bounds[0] <= len(node_numbers) <= self.job.bounds[1]
        assert all(number in self.up for number in node_numbers), "a member is not there"
        assert all(number in self.prepared for number in node_numbers), "a member has not prepared"
        assert not self.starts or action.attempt > self.starts[-1]
        assert (action.master is None) == (len(node_numbers) == 1)
        self.starts.append(action.attempt)
        self.prepared.clear()
        self.codes = {}
        for node_rank, number in enumerate(node_numbers):
            node = self.up[number]
            assert node.attempt is None
            first = node_rank * self.job.per_node
            node.attempt, node.reported = action.attempt, False
            node.to_start = list(range(first, first + self.job.per_node))

    # --- what happens

    def choices(self) -> list[tuple[str, int]]:
        can: list[tuple[str, int]] = [("join", number) for number in sorted(self.pending)]
        for number, node in sorted(self.up.items()):
            if node.serial:
                can.append(("survey", number))
            if node.prepares is not None:
                can.append(("prepared", number))
            if node.reaches is not None:
                can.append(("reached", number))
            if node.to_start:
                can.append(("started", number))
            elif node.running:
                can.append(("exited", number))
            elif node.attempt is not None:
                can.append(("gone", number))
        if self.discovers:
            can.append(("discovered", 0))
        return can

    def mischief(self) -> list[tuple[str, int]]:
        can: list[tuple[str, int]] = []
        if self.wild:
            can += [("fails", number) for number in sorted(self.pending)]
            can += [("lost", number) for number in sorted(self.up)]
            can += [("flawed", number) for number, node in sorted(self.up.items()) if node.serial]
            can += [
                ("no way", number)
                for number, node in sorted(self.up.items())
                if node.reaches is not None
            ]
            can += [("late", 0)] if self.notices else []
            can += [("signal", 0)] if self.signals < self.most_signals else []
        return can

    def say(self, number: int, message) -> None:
        self.notices.append((number, message))
        self.act(self.job.say(number, message))

    def go_on(self) -> None:
        job, draw = self.job, self.data.draw
        choices, mischief = self.choices(), self.mischief()
        if mischief and (draw(st.integers(0, 99)) >= 90 or not choices):
            choices = mischief
        if not choices or (
            self.wild and job.policy.deadline() is not None and draw(st.integers(0, 99)) >= 95
        ):
            assert job.policy.deadline() is not None, (
                f"stuck in phase {job.phase}: nobody owes anything"
            )
            choices = [("tick", 0)]
        what, number = draw(st.sampled_from(choices)) if self.wild else choices[0]
        if self.wild:
            job.now += draw(st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.5, 2.0]))
        node = self.up.get(number)
        match what:
            case "join":
                self.pending.discard(number)
                self.up[number] = Node()
                self.act(job.joined(number))
            case "fails":
                self.pending.discard(number)
                self.act(job.unreachable(number, passing=draw(st.integers(0, 9)) < 8))
            case "lost":
                del self.up[number]
                self.prepared.discard(number)
                self.act(job.lost(number))
            case "survey" | "flawed":
                serial, node.serial = node.serial, 0
                flaws = {"script_sha256": None} if what == "flawed" else {}
                self.say(number, job.answer(number, serial=serial, **flaws))
            case "prepared":
                attempt, node.prepares = node.prepares, None
                if attempt == job.attempt:
                    self.prepared.add(number)
                self.say(
                    number,
                    m.Prepared(attempt=attempt, port=7, problem=None, hint=None, warning=None),
                )
            case "reached" | "no way":
                attempt, node.reaches = node.reaches, None
                route = m.Route(address="10.0.0.1", local="10.0.0.2", interface="eth0")
                self.say(
                    number,
                    m.Reached(
                        attempt=attempt, routes=(route,) if what == "reached" else (), problem=None
                    ),
                )
            case "started":
                ranks, node.to_start = node.to_start, []
                node.running = list(ranks)
                self.say(
                    number,
                    m.Started(attempt=node.attempt, pids={rank: 100 + rank for rank in ranks}),
                )
            case "exited":
                self.exit(number, node)
            case "gone":
                attempt, node.attempt = node.attempt, None
                self.say(number, m.AttemptEnded(attempt=attempt, left=()))
            case "late":
                late, message = draw(st.sampled_from(self.notices))
                if getattr(message, "attempt", None) != job.attempt or late not in self.up:
                    self.act(job.say(late, message))
            case "discovered":
                self.discovers -= 1
                self.discovered()
            case "tick":
                job.now = max(job.now, job.policy.deadline())
                self.act(job.tick())
            case "signal":
                self.signals += 1
                signum = draw(st.sampled_from([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]))
                policy = job.policy
                runs = job.phase in ("starting", "running", "stopping")
                if signum != signal.SIGUSR1 and self.signum is None:
                    if job.phase == "lingering":
                        self.succeeded = True
                    elif runs and policy.ended == policy.world_size:
                        self.late = self.late or signum
                    else:
                        self.signum = signum
                self.act(job.signal(signum))

    def discovered(self) -> None:
        job = self.job
        if not self.wild:
            self.act(job.step(p.Discovered(hosts=tuple(job.names))))
            return
        hosts = [name for name in job.names if self.data.draw(st.integers(0, 3))]
        if len(job.names) < 6 and self.data.draw(st.booleans()):
            job.names.append(f"m{len(job.names)}")
            hosts.append(job.names[-1])
        self.act(job.step(p.Discovered(hosts=tuple(hosts))))

    def exit(self, number: int, node: Node) -> None:
        job, rank = self.job, node.running.pop()
        code, tail = 0, b""
        if node.reported:
            code = -15
        elif self.wild and self.data.draw(st.integers(0, 9)) >= 7:
            code, tail = self.data.draw(
                st.sampled_from([(1, job.RAISED), (7, job.LOST), (-9, b"")])
            )
        self.codes[rank] = code
        if code and not node.reported:
            self.failed.add(code if code > 0 else 128 - code)
        exited = WorkerExit(
            attempt=node.attempt,
            rank=rank,
            pid=100 + rank,
            returncode=code,
            uptime_s=60.0,
            ended=job.now,
            told_to_stop=node.reported,
            oom_kills=0,
            error_file=None,
            stderr_tail=tail,
        )
        self.say(number, exited)


def run(job, data) -> World:
    world = World(job, data)
    world.act(job.begin())
    for step in range(ENOUGH):
        if job.exit_code is not None:
            break
        world.wild = step < STEPS
        world.go_on()
    assert job.exit_code is not None, f"no end in sight, in phase {job.phase}"
    return world


def check_end(world: World) -> None:
    job = world.job
    assert isinstance(job.actions[-1], p.EndJob)
    left = {
        number: node.running for number, node in world.up.items() if node.running or node.to_start
    }
    assert not left, "workers were left running"
    counted = [failed for failed in job.of(p.ReportFailure) if not failed.final]
    assert job.policy.restarts == len(counted) == len(job.entries("restarting"))
    assert job.policy.restarts <= job.policy.settings.max_restarts
    assert [failed.restarts for failed in job.of(p.ReportFailure)] == list(
        range(len(job.of(p.ReportFailure)))
    )
    if world.succeeded:
        assert job.exit_code == 0
        assert not any(world.codes.values())
        assert len(world.codes) == len(job.node_numbers) * job.per_node
    elif world.signum is not None:
        assert job.exit_code == 128 + world.signum
    elif world.late is not None and job.exit_code == 128 + world.late:
        pass  # the job would have gone on
    elif job.exit_code == 0:
        assert world.codes
        assert not any(world.codes.values())
        assert len(world.codes) == len(job.node_numbers) * job.per_node, (
            "0 only if every worker has ended with 0"
        )
    elif job.exit_code != 69:
        assert job.exit_code in world.failed
        assert job.of(p.ReportFailure)[-1].final
    for node, stop in job.sent(m.Stop):
        assert node in range(len(job.names))
        assert stop.attempt in world.starts


@given(data=st.data(), hosts=st.integers(1, 6), max_restarts=st.integers(0, 2))
@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_job_of_fixed_size_ends_once_and_as_promised(make_nodes, data, hosts, max_restarts):
    job = make_nodes(hosts, per_node=2, max_restarts=max_restarts)
    world = run(job, data)
    check_end(world)
    lost = any(job.entries("node_lost"))
    assert len(world.starts) <= max_restarts + 1
    if lost and not max_restarts and world.signum is None and world.starts:
        assert job.exit_code in ({0, 69} | world.failed)


@given(
    data=st.data(),
    hosts=st.integers(1, 6),
    least=st.integers(1, 3),
    most=st.integers(1, 6),
    discover=st.booleans(),
    max_restarts=st.integers(0, 1),
)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_an_elastic_job_ends_once_and_as_promised(
    make_nodes, data, hosts, least, most, discover, max_restarts
):
    bounds = (min(least, hosts), max(least, min(most, hosts)))
    job = make_nodes(hosts, per_node=1, bounds=bounds, discover=discover, max_restarts=max_restarts)
    check_end(run(job, data))


@given(data=st.data(), hosts=st.integers(2, 6), spares=st.integers(1, 3))
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_job_with_spares_ends_once_and_as_promised(make_nodes, data, hosts, spares):
    wanted = max(1, hosts - spares)
    check_end(run(make_nodes(hosts, per_node=1, bounds=(wanted, wanted), max_restarts=1), data))


# --- scale


def work_of_a_job(make_nodes, nodes: int) -> tuple[int, int, int]:
    """Gather, start, fail, restart, lose a node, end. Count actions and looks at lists of all
    nodes; find the longest text."""
    job = make_nodes(nodes, per_node=1, bounds=(1, nodes), max_restarts=1)
    touched = 0

    class Counted(list):
        def __iter__(self):
            nonlocal touched
            touched += len(self)
            return super().__iter__()

    job_nodes = job.policy._attempt_start._node_setup.nodes
    job_nodes.all_nodes = Counted(job_nodes.all_nodes)
    job.begin()
    for node in range(nodes):
        job.joined(node)
    serial = job.asked(0)
    for node in range(nodes):
        job.say(node, job.answer(node, serial=serial))
    job.come_up()
    job.exited(0, 1)
    for rank in range(1, nodes):
        job.exited(rank, -15, reported=True)
    job.all_gone()
    serial = job.asked(0)
    for node in range(nodes):
        job.say(node, job.answer(node, serial=serial))
    job.come_up()
    job.lost(nodes // 2)
    for rank in range(nodes):
        if rank != nodes // 2:
            job.exited(rank, -15, reported=True)
    job.all_gone(nodes // 2)
    serial = job.asked(0)
    for node in range(nodes):
        if node != nodes // 2:
            job.say(node, job.answer(node, serial=serial))
    assert (job.phase, job.policy.world_size) == ("preparing", nodes - 1)
    texts = [say.text for say in job.of(p.ShowMessage)] + [
        str(entry.fields) for entry in job.of(p.RecordEvent) if entry.type != "workers_started"
    ]
    return len(job.actions), touched, max(map(len, texts))


def test_work_grows_with_the_nodes_and_not_with_their_square(make_nodes):
    small_actions, small_touched, _ = work_of_a_job(make_nodes, 256)
    large_actions, large_touched, longest = work_of_a_job(make_nodes, 512)
    assert large_actions <= 2 * small_actions
    assert large_touched <= 2 * small_touched + 16, "some event walks over all nodes"
    assert longest < 300


def test_thousands_of_hosts_that_fail_are_reported_in_a_screenful(make_nodes):
    job = make_nodes(4096)
    job.begin()
    for node in range(4096):
        job.unreachable(
            node,
            step="login",
            text=f"n{node} knows none of our keys",
            hint="ssh-copy-id",
            passing=False,
        )
    assert job.exit_code == 69
    assert len(job.notices.splitlines()) < 30
    assert len(job.notices) < 4000
