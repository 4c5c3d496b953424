"""The start of an attempt where each node has a launcher. Pure.

Ours gets the plan; the others hear what they need to plan their own workers, by their own command lines.
"""

from __future__ import annotations

from collections.abc import Iterator

from distlaunch.coordinator.policy.composition import Composition
from distlaunch.coordinator.policy.start_messages import Streams, start_of
from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.planning.joined_plan import interfaces_of


def commences(
    plan: LaunchPlan, composition: Composition, streams: Streams, *, restarts: int
) -> Iterator[tuple[int, m.Start | p.Commence]]:
    """Give, by member, what starts its workers."""
    places = composition.places or tuple(
        (node.host, rank) for node, rank in zip(plan.nodes, plan.first_ranks, strict=True)
    )
    hosts = tuple(node.host for node in plan.nodes)
    slots = tuple(node.slots or 0 for node in plan.nodes)
    ends = (*(first for _, first in places[1:]), len(plan.workers))
    for member, (_, first), end in zip(composition.members, places, ends, strict=True):
        workers = plan.workers[first:end]
        node_rank = workers[0].node_rank
        if member == 0:
            yield member, start_of(plan, node_rank, workers, streams, plan.shared_env)
            continue
        interface, nccl = interfaces_of(plan, node_rank)
        yield (
            member,
            p.Commence(
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
