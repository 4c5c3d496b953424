"""Who takes part in an attempt. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.record import Record
from distlaunch.core.protocol.remote import Surveyed


class Composition(Record):
    """The nodes of an attempt and the plan for them, complete but for port, meeting point and attempt."""

    members: tuple[int, ...]
    """By node rank: the node's number in the policy's list of hosts, which never changes."""
    plan: LaunchPlan
    places: tuple[tuple[str, int], ...] | None = None
    """By member's place: its host and lowest rank, where members are not the plan's nodes."""


Compose = Callable[[Mapping[int, Surveyed]], Composition]
"""Plans for the nodes that were surveyed (all that may take part, spares as well; it takes what the bounds allow).

Raises ConfigError for what can never work, and ``NodesDiffer`` for what may look otherwise in a moment.
"""
