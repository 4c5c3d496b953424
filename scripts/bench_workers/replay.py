"""Replay a job of many nodes to its policy alone: start, one failure, stop, restart, end. Prints
figures as JSON.

Usage: replay.py NODES WORKERS_PER_NODE. What agents would say is made up here, what is planned from
it is real.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.coordinator.policy.events_and_actions import AttemptPlan, PlanAttempt
from distlaunch.coordinator.policy.job import JobPolicy
from distlaunch.coordinator.policy.job_settings import PolicySettings
from distlaunch.core.model.record import replace
from distlaunch.core.model.topology import CpuInventory, GpuInventory
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from distlaunch.launch import remote
from distlaunch.launch.make_plan import make_plan
from distlaunch.planning.train_options import TrainOptions

RAISED = b"""Traceback (most recent call last):
  File "train.py", line 5, in step
    raise ValueError("the cause")
ValueError: the cause
"""
_CHUNK = 1024


class Replay:
    """Plays the nodes of one job; times the policy with what it calls, and counts what comes of
    it."""

    def __init__(self, nodes: int, per_node: int) -> None:
        options = TrainOptions(
            script="train.py",
            hosts=f"n[00001-{nodes:05}]",
            procs_per_node=per_node,
            max_restarts=1,
            join_timeout=600.0,
        )
        planned = make_plan(options, {"PATH": "/usr/bin", "HOME": "/nowhere"})
        settings = remote.RemoteNodes(planned.planner, options, {}).node_setup_settings()
        self.composing_s = 0.0
        self.seconds = 0.0
        self.policy = JobPolicy(
            PolicySettings(
                node_setup=replace(settings, plan_attempt=self.timed(settings.plan_attempt)),
                max_restarts=1,
            )
        )
        self.nodes = nodes
        self.per_node = per_node
        self.now = 0.0
        self.counts: Counter[type] = Counter()
        self.longest = 0
        self.exit_code: int | None = None
        self.serial = 0
        self.stops = 0

    def timed(self, plan_attempt: PlanAttempt) -> PlanAttempt:
        """Note how much of the time goes into plans."""

        def composed(surveys: Mapping[int, m.Surveyed]) -> AttemptPlan:
            began = time.perf_counter()
            try:
                return plan_attempt(surveys)
            finally:
                self.composing_s += time.perf_counter() - began

        return composed

    def play(self, events: Iterable[a.Event]) -> None:
        """Feed events; their making, and looking at what comes of them, are not timed."""
        rest = iter(events)
        while ready := list(islice(rest, _CHUNK)):
            came: list[a.Action] = []
            step, now = self.policy.step, self.now
            began = time.perf_counter()
            for event in ready:
                now += 1e-6
                came += step(event, now)
            self.seconds += time.perf_counter() - began
            self.now = now
            self._look_at(came)

    def _look_at(self, actions: list[a.Action]) -> None:
        self.counts.update(map(type, actions))
        for action in actions:
            match action:
                case a.SendToNode(message=m.Survey() as question):
                    self.serial = question.serial
                case a.SendToNode(message=m.Stop()):
                    self.stops += 1
                case a.ShowMessage():
                    self.longest = max(self.longest, len(action.text))
                case a.RecordEvent() if action.type not in ("worker_exited", "workers_started"):
                    self.longest = max(self.longest, len(str(action.fields)))
                case a.EndJob():
                    self.exit_code = action.exit_code

    def say(self, messages: Iterable[tuple[int, object]]) -> None:
        """Make nodes send a message."""
        self.play(a.FromNode(node=node, message=message) for node, message in messages)

    def survey(self) -> None:
        """Answer the survey for all nodes."""
        cpus, gpus = CpuInventory(allowed=tuple(range(64)), online=64), GpuInventory()

        def answer(node: int) -> m.Surveyed:
            address = f"10.{node >> 16}.{node >> 8 & 255}.{node & 255}"
            return m.Surveyed(
                serial=self.serial,
                hostname=f"n{node + 1:05}",
                environ={},
                named=(address,),
                gpus=gpus,
                cpus=cpus,
                interfaces=(m.Interface(name="eth0", address=address, prefix=8),),
                granted_cpus=None,
                python="/usr/bin/python3",
                script_sha256="5c" * 32,
                problem=None,
                hint=None,
                shares_run_dir=True,
            )

        self.say((node, answer(node)) for node in range(self.nodes))

    def come_up(self) -> None:
        """Play an attempt from its preparation to the start of the last worker."""
        at, per_node = self.policy.attempt, self.per_node
        prepared = m.Prepared(attempt=at, port=29500, problem=None, hint=None, warning=None)
        self.say(
            (node, replace(prepared, port=None) if node else prepared) for node in range(self.nodes)
        )
        route = m.Route(address="10.0.0.0", local="10.0.0.1", interface="eth0")
        self.say(
            (
                node,
                m.Reached(
                    attempt=at, routes=(replace(route, local=f"10.0.0.{node}"),), problem=None
                ),
            )
            for node in range(1, self.nodes)
        )
        firsts = range(0, self.nodes * per_node, per_node)
        self.say(
            (node, m.Started(attempt=at, pids=dict.fromkeys(range(first, first + per_node), 9)))
            for node, first in enumerate(firsts)
        )

    def exit(
        self, ranks: Iterable[int], returncode: int, *, reported: bool = False, tail: bytes = b""
    ) -> None:
        """End workers."""
        at = self.policy.attempt
        self.say(
            (
                rank // self.per_node,
                WorkerExit(
                    attempt=at,
                    rank=rank,
                    pid=9,
                    returncode=returncode,
                    uptime_s=60.0,
                    ended=self.now,
                    told_to_stop=reported,
                    oom_kills=0,
                    error_file=None,
                    stderr_tail=tail,
                ),
            )
            for rank in ranks
        )

    def all_gone(self) -> None:
        """Report for all nodes that nothing of the attempt is left."""
        gone = m.AttemptEnded(attempt=self.policy.attempt, left=())
        self.say((node, gone) for node in range(self.nodes))

    def run(self) -> None:
        """Play a whole job."""
        ranks = range(self.nodes * self.per_node)
        failing = len(ranks) * 2 // 3
        self.play([a.Begin()])
        self.play(a.Joined(node=node) for node in range(self.nodes))
        self.survey()
        self.come_up()
        self.exit([failing], 1, tail=RAISED)
        self.now += 1.0
        self.play([a.Tick()])
        self.exit((rank for rank in ranks if rank != failing), -15, reported=True)
        self.all_gone()
        self.survey()
        self.come_up()
        self.exit(ranks, 0)
        self.all_gone()
        came = self.exit_code, self.counts[a.StartAttempt], self.stops, self.counts[a.ReportFailure]
        assert came == (0, 2, self.nodes, 1), came


def main() -> None:
    nodes, per_node = map(int, sys.argv[1:])
    replay = Replay(nodes, per_node)
    replay.run()
    figures = {
        "replay": replay.seconds,
        "replay_composing": replay.composing_s,
        "replay_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        "replay_actions": float(replay.counts.total()),
        "replay_longest_text": float(replay.longest),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
