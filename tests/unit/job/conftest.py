"""A job as its policy sees it: tests play the agents and the user."""

from __future__ import annotations

import pytest

from distlaunch.core.wire import messages as m
from distlaunch.job import policy as p
from distlaunch.job.settings import PolicySettings

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
    """One policy with ``nodes`` times ``per_node`` workers; ``now`` is its clock, ``actions`` all that it has wanted."""

    RAISED, LOST, IMPORT = RAISED, LOST, IMPORT

    def __init__(self, nodes: int = 1, per_node: int = 2, **settings) -> None:
        self.nodes, self.per_node = nodes, per_node
        self.policy = p.JobPolicy(
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

    def prepared(self, node: int = 0, *, port=None, problem=None, hint=None, warning=None, attempt=None):
        at = self.attempt if attempt is None else attempt
        port = 5000 + at if port is None and node == 0 and problem is None else port
        return self.say(node, m.Prepared(attempt=at, port=port, problem=problem, hint=hint, warning=warning))

    def started(self, rank: int, *, attempt=None) -> list[p.Action]:
        at = self.attempt if attempt is None else attempt
        return self.say(rank // self.per_node, m.Started(attempt=at, pids={rank: 1000 + rank}))

    def exited(
        self, rank: int, returncode: int = 0, *, tail=b"", told=False, uptime_s=1.0, attempt=None, error_file=None
    ):
        exited = m.WorkerExited(
            attempt=self.attempt if attempt is None else attempt,
            rank=rank,
            pid=1000 + rank,
            returncode=returncode,
            uptime_s=uptime_s,
            ended=self.now,
            told_to_stop=told,
            oom_kills=0,
            error_file=error_file,
            tail=tail,
        )
        return self.say(rank // self.per_node, exited)

    def gone(self, node: int = 0, *, left=(), attempt=None) -> list[p.Action]:
        return self.say(node, m.Gone(attempt=self.attempt if attempt is None else attempt, left=left))

    def fault(self, node: int = 0, text: str = "it broke") -> list[p.Action]:
        return self.say(node, m.Fault(text=text))

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

    def fail(self, *, tail: bytes = RAISED, returncode: int = 1, uptime_s: float = 1.0) -> list[p.Action]:
        """Let rank 0 fail and the others obey."""
        self.exited(0, returncode, tail=tail, uptime_s=uptime_s)
        for rank in self.ranks[1:]:
            self.exited(rank, -15, told=True)
        return self.all_gone()

    # --- reading what came of it

    def of(self, kind: type, actions=None) -> list:
        return [action for action in (self.actions if actions is None else actions) if isinstance(action, kind)]

    def sent(self, kind: type, actions=None) -> list[tuple[int, object]]:
        return [(to.node, to.message) for to in self.of(p.ToNode, actions) if isinstance(to.message, kind)]

    def entries(self, kind: str) -> list[dict]:
        return [dict(entry.fields) for entry in self.of(p.Entry) if entry.type == kind]

    @property
    def said(self) -> str:
        return "\n".join(say.text for say in self.of(p.Say))

    @property
    def exit_code(self) -> int | None:
        ends = self.of(p.End)
        assert len(ends) <= 1, "ended twice"
        return ends[0].exit_code if ends else None


@pytest.fixture(scope="session")
def make_job() -> type[Job]:
    return Job
