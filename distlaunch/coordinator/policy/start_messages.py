"""Make the messages that start the workers of an attempt on its nodes. No I/O.

If each node has a launcher, the agent of the coordinator's node gets the plan. The other launchers
get only values, and plan their workers from these and their own command lines.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from distlaunch.coordinator.policy.events_and_actions import AttemptPlan
from distlaunch.core.model.plan import LaunchPlan, WorkerPlan
from distlaunch.core.model.variables import GLOO_INTERFACE, NCCL_INTERFACE
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import launcher_messages as p

_PERIOD_SHARE = 0.05
"""Share of ``hang_notice_s`` by which the reported silence may be too long."""


class Streams(NamedTuple):
    """The terminal and the stdin of the workers."""

    terminal: tuple[int, int] | None
    """Rows and columns of the pseudo-terminal of the only worker."""
    stdin: bool
    """Rank 0 gets the launcher's stdin, directly or as messages."""
    is_remote: bool
    """The agents run in their own processes, even on this machine."""
    node_logs: str = ""
    orphan_grace_s: float | None = None
    """How long workers may take to end if their agent or the launcher vanishes. None: the value set
    when the spawner was started."""


def starts(plan: LaunchPlan, streams: Streams) -> Iterator[tuple[int, m.Start]]:
    """Yield the start message of each node, by node rank."""
    env = plan.shared_env
    for node_rank, workers in itertools.groupby(plan.workers, lambda worker: worker.node_rank):
        yield node_rank, start_of(plan, node_rank, workers, streams, env)


def launcher_starts(
    plan: LaunchPlan, attempt_plan: AttemptPlan, streams: Streams, *, restarts: int
) -> Iterator[tuple[int, m.Start | p.StartWorkers]]:
    """Yield the start message of each launcher, by node number."""
    places = attempt_plan.places or tuple(
        (node.host, rank) for node, rank in zip(plan.nodes, plan.first_ranks, strict=True)
    )
    hosts = tuple(node.host for node in plan.nodes)
    slots = tuple(node.slots or 0 for node in plan.nodes)
    ends = (*(first for _, first in places[1:]), len(plan.workers))
    for number, (_, first), end in zip(attempt_plan.node_numbers, places, ends, strict=True):
        workers = plan.workers[first:end]
        node_rank = workers[0].node_rank
        if number == 0:
            yield number, start_of(plan, node_rank, workers, streams, plan.shared_env)
            continue
        interface, nccl = interfaces_of(plan, node_rank)
        yield (
            number,
            p.StartWorkers(
                attempt=plan.attempt,
                restarts=restarts,
                node_rank=node_rank,
                local_ranks=tuple(worker.local_rank for worker in workers),
                hosts=hosts,
                slots=slots,
                master_addr=plan.master_addr or "",
                master_port=plan.master_port or 0,
                interface=interface,
                nccl_interface=nccl,
                cluster=plan.cluster,
            ),
        )


def start_of(
    plan: LaunchPlan,
    node_rank: int,
    workers: Iterable[WorkerPlan],
    streams: Streams,
    env: Mapping[str, str],
) -> m.Start:
    """Return the start message for these workers of a node.

    ``env`` holds the variables that all workers share.
    """
    rows, columns = streams.terminal or (0, 0)
    node = plan.nodes[node_rank]
    return m.Start(
        attempt=plan.attempt,
        argv=node.argv or plan.argv,
        env={**env, **node.env} if node.env else env,
        cwd=plan.workdir,
        workers=tuple(map(_worker_spec, workers)),
        uses_gpus=bool(node.devices),
        signal_group=plan.signal_group,
        terminal=streams.terminal is not None,
        rows=rows,
        columns=columns,
        stdin_rank=0 if node_rank == 0 and streams.stdin else None,
        preload=plan.preload,
        preload_log=plan.layout.preload_path(plan.run_dir, plan.attempt),
        preload_bound_s=plan.hang_timeout_s,
        watch=plan.hang_timeout_s is not None or plan.hang_notice_s is not None,
        output_period_s=_output_period_s(plan),
        bootstrap=plan.bootstrap,
        is_remote=streams.is_remote,
        node_logs=streams.node_logs,
        orphan_grace_s=streams.orphan_grace_s,
        store=plan.store and node_rank == 0,
        shared_memory=plan.shared_memory,
        env_starts=plan.env_starts,
        stdin_from_launcher=streams.is_remote and node_rank == 0 and streams.stdin,
        run_dir=plan.run_dir,
        layout=plan.layout,
    )


def interfaces_of(plan: LaunchPlan, node_rank: int) -> tuple[str, str]:
    """Return the interfaces for gloo and for NCCL on a node. An empty name means that none is
    set."""
    env = plan.nodes[node_rank].env
    return env.get(GLOO_INTERFACE, ""), env.get(NCCL_INTERFACE, "").removeprefix("=")


def _output_period_s(plan: LaunchPlan) -> float:
    """Return the period in which a node reports which ranks wrote output. It is longer if only the
    hang notice needs the reports."""
    if plan.hang_timeout_s is not None or plan.hang_notice_s is None:
        return 1.0
    return max(1.0, plan.hang_notice_s * _PERIOD_SHARE)


def _worker_spec(worker: WorkerPlan) -> m.WorkerSpec:
    return m.WorkerSpec(
        rank=worker.rank,
        local_rank=worker.local_rank,
        argv=worker.argv,
        env=worker.env,
        cpus=worker.cpus,
        error_file=worker.env["TORCHELASTIC_ERROR_FILE"],
    )
