"""The policy of a job. Tests play the agents and the user."""

from __future__ import annotations

import pytest

from distlaunch.coordinator.policy import events_and_actions as p
from distlaunch.coordinator.policy.events_and_actions import AttemptPlan
from distlaunch.coordinator.policy.job import JobPolicy
from distlaunch.coordinator.policy.job_settings import NodeSetupSettings, PolicySettings
from distlaunch.core.errors import NodesError
from distlaunch.core.model.plan import LaunchPlan, WorkerPlan
from distlaunch.core.model.record import replace
from distlaunch.core.model.topology import CpuInventory, GpuInventory, Node
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from distlaunch.planning.master_address import MasterChoice
from distlaunch.transport.connect_errors import ConnectFailure
from tests.unit.coordinator.joined.assembling import make_assembly  # noqa: F401 - a fixture
from tests.unit.coordinator.joined.joined_launcher import joined_launcher  # noqa: F401 - a fixture
from tests.unit.coordinator.remote_agents import remote_agents  # noqa: F401 - a fixture

RAISED = b"""Traceback (most recent call last):
  File "/home/u/train.py", line 9, in <module>
    step()
  File "/home/u/train.py", line 5, in step
    raise ValueError("the cause")
ValueError: the cause
"""
LOST = b"""Traceback (most recent call last):
  File "/home/u/train.py", line 7, in <module>
    dist.all_reduce(x)
RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2222
"""
IMPORT = b"""Traceback (most recent call last):
  File "/home/u/train.py", line 1, in <module>
    import nothing_of_the_kind
ModuleNotFoundError: No module named 'nothing_of_the_kind'
"""


class Job:
    """One policy with ``nodes`` times ``per_node`` workers. ``now`` is its clock, ``actions`` has
    all of its actions."""

    RAISED, LOST, IMPORT = RAISED, LOST, IMPORT

    def __init__(self, nodes: int = 1, per_node: int = 2, **settings) -> None:
        self.nodes, self.per_node = nodes, per_node
        self.policy = JobPolicy(
            PolicySettings(
                hosts=tuple(f"node{index}" for index in range(nodes)),
                first_ranks=tuple(index * per_node for index in range(nodes)),
                world_size=nodes * per_node,
                **settings,
            )
        )
        self.now = 0.0
        self.actions: list[p.Action] = []

    @property
    def attempt(self) -> int:
        return self.policy.attempt

    @property
    def phase(self) -> str:
        return self.policy.phase

    def step(self, event: p.Event) -> list[p.Action]:
        actions = self.policy.step(event, self.now)
        self.actions += actions
        return actions

    def begin(self) -> list[p.Action]:
        return self.step(p.Begin())

    def tick(self) -> list[p.Action]:
        return self.step(p.Tick())

    def signal(self, signum: int) -> list[p.Action]:
        return self.step(p.Signalled(signum=signum))

    def say(self, node: int, message: m.FromAgent) -> list[p.Action]:
        return self.step(p.FromNode(node=node, message=message))

    def prepared(
        self,
        node: int = 0,
        *,
        port=None,
        problem=None,
        hint=None,
        warning=None,
        attempt=None,
        ports=(),
    ):
        at = self.attempt if attempt is None else attempt
        port = 5000 + at if port is None and node == 0 and problem is None else port
        answer = m.Prepared(
            attempt=at, port=port, problem=problem, hint=hint, warning=warning, ports=ports
        )
        return self.say(node, answer)

    def started(self, rank: int, *, attempt=None) -> list[p.Action]:
        at = self.attempt if attempt is None else attempt
        return self.say(rank // self.per_node, m.Started(attempt=at, pids={rank: 1000 + rank}))

    def exited(
        self,
        rank: int,
        returncode: int = 0,
        *,
        tail=b"",
        reported=False,
        uptime_s=1.0,
        attempt=None,
        error_file=None,
        ended=None,
    ):
        exited = WorkerExit(
            attempt=self.attempt if attempt is None else attempt,
            rank=rank,
            pid=1000 + rank,
            returncode=returncode,
            uptime_s=uptime_s,
            ended=self.now if ended is None else ended,
            told_to_stop=reported,
            oom_kills=0,
            error_file=error_file,
            stderr_tail=tail,
        )
        return self.say(self.joined_launcher_of(rank), exited)

    def gone(self, node: int = 0, *, left=(), attempt=None) -> list[p.Action]:
        return self.say(
            node, m.AttemptEnded(attempt=self.attempt if attempt is None else attempt, left=left)
        )

    def fault(self, node: int = 0, text: str = "it broke") -> list[p.Action]:
        return self.say(node, m.AgentFailed(text=text))

    def joined_launcher_of(self, rank: int) -> int:
        return rank // self.per_node

    # --- whole turns

    @property
    def ranks(self) -> range:
        return range(self.nodes * self.per_node)

    def run(self) -> Job:
        """Bring the first attempt to where all workers run."""
        self.begin()
        return self.come_up()

    def come_up(self) -> Job:
        for node in range(self.nodes):
            self.prepared(node)
        for rank in self.ranks:
            self.started(rank)
        return self

    def all_gone(self) -> list[p.Action]:
        attempt = self.attempt
        return [action for node in range(self.nodes) for action in self.gone(node, attempt=attempt)]

    def fail(
        self, *, tail: bytes = RAISED, returncode: int = 1, uptime_s: float = 1.0
    ) -> list[p.Action]:
        """Make rank 0 fail and all others stop."""
        self.exited(0, returncode, tail=tail, uptime_s=uptime_s)
        for rank in self.ranks[1:]:
            self.exited(rank, -15, reported=True)
        return self.all_gone()

    # --- reading what came of it

    def of(self, kind: type, actions=None) -> list:
        return [
            action
            for action in (self.actions if actions is None else actions)
            if isinstance(action, kind)
        ]

    def sent(self, kind: type, actions=None) -> list[tuple[int, object]]:
        return [
            (to.node, to.message)
            for to in self.of(p.SendToNode, actions)
            if isinstance(to.message, kind)
        ]

    def entries(self, kind: str) -> list[dict]:
        return [dict(entry.fields) for entry in self.of(p.RecordEvent) if entry.type == kind]

    @property
    def notices(self) -> str:
        lines = [each for each in self.actions if isinstance(each, p.ShowMessage | p.JobError)]
        return "\n".join(each.text for each in lines)

    @property
    def exit_code(self) -> int | None:
        ends = self.of(p.EndJob)
        assert len(ends) <= 1, "ended twice"
        return ends[0].exit_code if ends else None


SURVEYED = m.Surveyed(
    serial=0,
    hostname="",
    environ={},
    interfaces=(),
    named=(),
    gpus=GpuInventory(),
    cpus=CpuInventory(allowed=(0,), online=1),
    granted_cpus=None,
    python="/usr/bin/python3",
    script_sha256="5c",
    problem=None,
    hint=None,
    shares_run_dir=True,
)


class NodesJob(Job):
    """A job whose policy gathers ``hosts`` nodes with equal slots, of which between ``bounds``
    train."""

    def __init__(
        self,
        hosts: int = 4,
        per_node: int = 2,
        bounds=None,
        *,
        discover=False,
        launchers=False,
        join_timeout_s=60.0,
        retry_timeout_s=None,
        may_have_bounds=True,
        **more,
    ):
        self.bounds = (hosts, hosts) if bounds is None else bounds
        self.names = [f"n{number}" for number in range(hosts)]
        self.composed: list[AttemptPlan] = []
        self.refuses: Exception | None = None
        node_setup = NodeSetupSettings(
            hosts=tuple(self.names),
            bounds=self.bounds,
            survey=self.survey,
            plan_attempt=self.plan_attempt,
            addresses=lambda surveyed, host: ("10.0.0.1", host),
            choose_master=self.choose_master,
            token=lambda attempt: f"word{attempt}",
            join_timeout_s=join_timeout_s,
            retry_timeout_s=retry_timeout_s,
            discover=discover,
            launchers=launchers,
            may_have_bounds=may_have_bounds,
        )
        super().__init__(0, per_node, node_setup=node_setup, **more)

    def survey(self, serial: int) -> m.Survey:
        return m.Survey(
            serial=serial,
            workdir="/work",
            pythons=("/usr/bin/python3",),
            script="train.py",
            program="",
            run_dir="/runs/1",
            gpus=False,
            topology=False,
        )

    def plan_attempt(self, surveys) -> AttemptPlan:
        if self.refuses is not None:
            raise self.refuses
        node_numbers = tuple(surveys)[: self.bounds[1]]
        per_node = self.per_node
        nodes = tuple(Node(host=self.names[number], slots=per_node) for number in node_numbers)
        workers = tuple(
            WorkerPlan(
                rank=rank, local_rank=rank % per_node, node_rank=rank // per_node, env={}, cpus=None
            )
            for rank in range(per_node * len(node_numbers))
        )
        plan = LaunchPlan(
            job_id="j",
            backend="pytorch-ddp",
            nodes=nodes,
            workers=workers,
            argv=("python", "train.py"),
            workdir="/work",
            env={},
            base_env={},
            given_env={},
            run_dir="/runs/1",
            master_addr=None,
            wanted_port=0,
        )
        self.composed.append(AttemptPlan(node_numbers=node_numbers, plan=plan))
        return self.composed[-1]

    def choose_master(self, surveys, reached) -> MasterChoice:
        assert sorted(reached) == list(range(1, len(surveys)))
        if not all(answer.routes for answer in reached.values()):
            raise NodesError("no address of n0 can be reached from all")
        return MasterChoice(address="10.0.0.1", env={})

    @property
    def node_numbers(self) -> tuple[int, ...]:
        return self.composed[-1].node_numbers

    def joined_launcher_of(self, rank: int) -> int:
        return self.node_numbers[rank // self.per_node]

    @property
    def ranks(self) -> range:
        return range(len(self.node_numbers) * self.per_node)

    # --- what nodes tell

    def joined(self, *nodes: int) -> list[p.Action]:
        return [action for node in nodes for action in self.step(p.Joined(node=node))]

    def unreachable(
        self, node: int, *, step="connect", text="refused", hint=None, passing=True
    ) -> list[p.Action]:
        failure = ConnectFailure(
            host=self.names[node], step=step, text=text, hint=hint, passing=passing
        )
        return self.step(p.Unreachable(node=node, failure=failure))

    def lost(self, node: int, why="silent for 10 s") -> list[p.Action]:
        return self.step(p.Lost(node=node, why=why))

    def asked(self, node: int) -> int:
        """Return the serial of the newest survey of a node."""
        return max(
            (question.serial for to, question in self.sent(m.Survey) if to == node), default=0
        )

    def surveyed(self, *nodes: int, **flaws) -> list[p.Action]:
        return [action for node in nodes for action in self.say(node, self.answer(node, **flaws))]

    def answer(self, node: int, *, serial=None, **flaws) -> m.Surveyed:
        return replace(
            SURVEYED,
            serial=self.asked(node) if serial is None else serial,
            hostname=self.names[node],
            **flaws,
        )

    def reached(self, *nodes: int, routes=None, problem=None, attempt=None) -> list[p.Action]:
        route = m.Route(address="10.0.0.1", local="10.0.0.2", interface="eth0")
        answer = m.Reached(
            attempt=self.attempt if attempt is None else attempt,
            routes=(route,) if routes is None else routes,
            problem=problem,
        )
        return [action for node in nodes for action in self.say(node, answer)]

    def started(self, rank: int, *, attempt=None) -> list[p.Action]:
        at = self.attempt if attempt is None else attempt
        return self.say(
            self.joined_launcher_of(rank), m.Started(attempt=at, pids={rank: 1000 + rank})
        )

    # --- whole turns

    def gather(self, *nodes: int) -> None:
        """Connect and survey these nodes; all nodes by default."""
        for node in nodes or range(len(self.names)):
            self.joined(node)
            self.surveyed(node)

    def pass_time(self, seconds: float) -> list[p.Action]:
        """Move the clock forward and handle every deadline on the way."""
        actions: list[p.Action] = []
        until = self.now + seconds
        while (
            (due := self.policy.deadline()) is not None and due <= until and self.exit_code is None
        ):
            self.now = max(self.now, due)
            before = self.policy.deadline(), self.phase
            actions += self.tick()
            assert (self.policy.deadline(), self.phase) != before, "a deadline stands still"
        self.now = max(self.now, until) if self.exit_code is None else self.now
        return actions

    def come_up(self) -> NodesJob:
        """Bring a planned attempt to where all workers run."""
        self.settle()
        for rank in self.ranks:
            self.started(rank)
        return self

    def settle(self) -> None:
        first, *others = self.node_numbers
        self.prepared(first, port=5000 + self.attempt)
        for node in others:
            self.prepared(node)
        self.reached(*others)

    def run(self) -> NodesJob:
        self.begin()
        self.gather()
        return self.come_up()

    def survey_all(self) -> None:
        """Answer all open requests for a survey, of nodes that are up."""
        for node in range(len(self.names)):
            if self.policy._attempt_start._node_setup.nodes[node].serial:
                self.surveyed(node)

    def all_gone(self, *but: int) -> list[p.Action]:
        attempt = self.attempt
        return [
            a
            for node in self.node_numbers
            if node not in but
            for a in self.gone(node, attempt=attempt)
        ]

    def stop_others(self, *lost: int) -> list[p.Action]:
        """Let the workers end that are not on lost nodes."""
        for rank in self.ranks:
            if self.joined_launcher_of(rank) not in lost:
                self.exited(rank, -15, reported=True)
        return self.all_gone(*lost)

    def connects(self, actions=None) -> list[tuple[int, float]]:
        return [(connect.node, connect.delay_s) for connect in self.of(p.Connect, actions)]


@pytest.fixture(scope="session")
def make_job() -> type[Job]:
    return Job


@pytest.fixture(scope="session")
def make_nodes() -> type[NodesJob]:
    return NodesJob
