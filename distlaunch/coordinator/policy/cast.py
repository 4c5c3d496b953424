"""The nodes of one attempt, and which ranks each of them runs. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from distlaunch.coordinator.policy.job_settings import PolicySettings
from distlaunch.core.model.record import Record

if TYPE_CHECKING:
    from distlaunch.coordinator.policy.composition import Composition


class Cast(Record):
    """Who takes part, by node rank; messages name nodes by their member numbers."""

    members: tuple[int, ...]
    hosts: tuple[str, ...]
    first_ranks: tuple[int, ...]
    world_size: int
    node_ranks: Mapping[int, int]
    """By member number."""
    composition: Composition | None = None

    @staticmethod
    def fixed(settings: PolicySettings) -> Cast:
        """Give the nodes that the settings name, for a job that need not gather any."""
        members = tuple(range(len(settings.hosts)))
        return Cast(
            members=members,
            hosts=settings.hosts,
            first_ranks=settings.first_ranks,
            world_size=settings.world_size,
            node_ranks=dict(enumerate(members)),
        )

    @staticmethod
    def of(composition: Composition) -> Cast:
        """Give those of a plan. Raises ValueError if it leaves open which ranks a node runs."""
        plan, members, places = composition.plan, composition.members, composition.places
        world_size, first_ranks = plan.world_size, plan.first_ranks
        hosts = tuple(node.host for node in plan.nodes)
        if places is not None:
            hosts, first_ranks = tuple(host for host, _ in places), tuple(rank for _, rank in places)
        if world_size is None or not len(members) == len(hosts) == len(first_ranks):
            raise ValueError(f"a plan for {len(plan.nodes)} nodes does not settle the ranks of {len(members)} members")
        return Cast(
            members=members,
            hosts=hosts,
            first_ranks=first_ranks,
            world_size=world_size,
            node_ranks={member: rank for rank, member in enumerate(members)},
            composition=composition,
        )

    def host(self, member: int) -> str:
        """Name a member."""
        return self.hosts[self.node_ranks[member]]

    def host_of(self, rank: int) -> str:
        """Name the node of a worker."""
        from bisect import bisect_right

        return self.hosts[max(0, bisect_right(self.first_ranks, rank) - 1)]

    def first_rank(self, member: int) -> int:
        """Give a member's lowest rank."""
        return self.first_ranks[self.node_ranks[member]]

    def ranks(self, member: int) -> range:
        """Give a member's ranks."""
        node_rank = self.node_ranks[member]
        following = node_rank + 1
        end = self.first_ranks[following] if following < len(self.first_ranks) else self.world_size
        return range(self.first_ranks[node_rank], end)
