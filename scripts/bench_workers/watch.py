"""Replay a job of many ranks that report steps, and time what watching it costs. Prints figures as
JSON.

Usage: watch.py NODES WORKERS_PER_NODE. What agents would say is made up here.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import replay

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.coordinator.runtime.metrics import metrics_text
from distlaunch.coordinator.runtime.node_questions import Answers, NodeAnswer
from distlaunch.coordinator.runtime.snapshot import JobSnapshot, take_snapshot
from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.record import plain
from distlaunch.core.protocol import agent_messages as m
from distlaunch.jobs.top import view_of
from distlaunch.jobs.top_screen import ScreenState, draw

TIMES = 20


class Watched(replay.Replay):
    """A job whose plan is kept."""

    plan: LaunchPlan

    def _look_at(self, actions: list[a.Action]) -> None:
        super()._look_at(actions)
        for action in actions:
            if isinstance(action, a.StartAttempt) and action.attempt_plan is not None:
                self.plan = action.attempt_plan.plan

    def begin(self) -> None:
        """Play the job until all workers report steps."""
        self.play([a.Begin()])
        self.play(a.Joined(node=node) for node in range(self.nodes))
        self.survey()
        self.come_up()
        for step in range(1, 4):
            self.now += 1.0
            self.say(
                (
                    node,
                    m.Alive(
                        attempt=self.policy.attempt,
                        wrote=(),
                        heartbeats=tuple(
                            m.Heartbeat(rank=rank, values={"step": step, "loss": 0.5})
                            for rank in self.ranks(node)
                        ),
                    ),
                )
                for node in range(self.nodes)
            )

    def ranks(self, node: int) -> range:
        """Return the ranks of a node."""
        return range(node * self.per_node, (node + 1) * self.per_node)

    def snapshot(self) -> JobSnapshot:
        """Return what the launcher's main loop makes for each refresh."""
        return take_snapshot(
            self.policy, self.plan, run_dir="/runs/job", started=1.7e9, now=self.now
        )

    def answers(self, second: int) -> Answers:
        """Return what the nodes would say of their usage."""
        return Answers(
            attempt=0,
            nodes=tuple(
                NodeAnswer(node=node, host=f"n{node + 1:05}", usage=self._usage(node, second))
                for node in range(self.nodes)
            ),
            unanswered=(),
        )

    def _usage(self, node: int, second: int) -> m.Usage:
        return m.Usage(
            attempt=0,
            serial=-1,
            clock_s=100.0 + second,
            agent_cpu_s=1 + 0.005 * second,
            cpus=64,
            memory_bytes=512 << 30,
            available_bytes=300 << 30,
            interfaces=(m.InterfaceUsage(name="eth0", received_bytes=second, sent_bytes=second),),
            read_bytes=second,
            written_bytes=second,
            workers=tuple(
                m.WorkerUsage(
                    rank=rank,
                    pid=9,
                    age_s=60.0,
                    processes=5,
                    cpu_s=10.0 + second,
                    rss_bytes=3 << 30,
                    gpus=(rank % 8,),
                    gpu_percent=97.0,
                    gpu_bytes=70 << 30,
                )
                for rank in self.ranks(node)
            ),
        )


def median_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(TIMES):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    nodes, per_node = map(int, sys.argv[1:])
    job = Watched(nodes, per_node)
    job.begin()
    taken, now, before = job.snapshot(), job.answers(2), job.answers(0)
    as_read, usage, earlier = (json.loads(json.dumps(plain(each))) for each in (taken, now, before))

    def screen() -> object:
        view = view_of(as_read, usage, earlier)
        return draw(view, ScreenState(is_interactive=True), width=200, height=50, now=1.7e9)

    figures = {
        "watch_snapshot": 1000 * median_s(job.snapshot),
        "watch_answer": 1000 * median_s(lambda: (json.dumps(plain(taken)), json.dumps(plain(now)))),
        "watch_screen": 1000 * median_s(screen),
        "watch_metrics": 1000
        * median_s(lambda: metrics_text(taken, version="1", launcher=None, nodes=now, now=1.7e9)),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
