"""Find the rank that is behind from the ranks' records of their collectives. No I/O.

The ranks' records are not read at one moment: the ranks of a job that goes on differ by a few
collectives. So a rank is behind only if two readings agree on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.text import name_ranks, printable
from distlaunch.core.protocol import agent_messages as m

_NO_DESCRIPTION = "undefined"
"""torch's description of a group that was made without one."""


class GroupOrder(Record):
    """How far the ranks of one process group have come, at one moment."""

    number: str
    name: str
    """Description or name of the group; empty if not known."""
    ranks: tuple[int, ...]
    """The ranks of the group that have answered."""
    is_whole: bool
    """Whether these are all ranks of the job."""
    behind: tuple[int, ...]
    """The ranks that have begun fewer collectives than others."""
    enqueued: int
    """The last collective that those ranks have begun; the lowest of all ranks if none is behind.
    0: none."""
    furthest: int
    """The last collective that any rank has begun."""
    waiting: tuple[int, ...]
    """The ranks in the collective that the ranks behind have not begun."""
    pending: int | None
    """The number of that collective, or of the one in which all ranks are."""
    operation: str
    sizes: str
    """Shapes of its tensors as JSON."""

    @property
    def words(self) -> str:
        """The order as text."""
        group = f"process group {printable(self.name or self.number)}"
        what = f"collective {self.pending}" if self.operation else "a collective"
        if self.operation:
            what += f", {printable(self.operation)}"
            if self.sizes not in ("", "[]"):
                what += f" of {printable(self.sizes)}"
        if self.behind:
            be = "is" if len(self.behind) == 1 else "are"
            where = f"after collective {self.enqueued}" if self.enqueued else "before collective 1"
            waits = f"; {name_ranks(self.waiting)} in {what}" if self.waiting else ""
            return f"{group}: {name_ranks(self.behind)} {be} behind, {where}{waits}"
        who = "all ranks" if self.is_whole and len(self.ranks) > 1 else name_ranks(self.ranks)
        be = "is" if len(self.ranks) == 1 else "are"
        if self.enqueued != self.furthest:
            return f"{group}: {who} go on, at collectives {self.enqueued} to {self.furthest}"
        if self.pending is not None:
            return f"{group}: {who} {be} in {what}"
        if not self.enqueued:
            return f"{group}: {who} {be} before collective 1"
        return f"{group}: {who} {be} after collective {self.enqueued}"


def group_orders(
    groups: Mapping[int, Sequence[m.ProcessGroup]],
    again: Mapping[int, Sequence[m.ProcessGroup]] | None = None,
    *,
    world: Sequence[int] = (),
) -> list[GroupOrder]:
    """Return the order in each process group, those with ranks that are behind first.

    ``groups`` has the process groups of each rank that has answered. ``again`` has those of a
    second reading: ranks are behind only if it shows them at the same collectives. ``world``: all
    ranks of the job. Groups without any collective are left out.
    """
    first, second = _orders(groups, world), None if again is None else _orders(again, world)
    found = []
    for name, order in first.items():
        later = order if second is None else second.get(name)
        is_steady = later is not None and (
            (order.behind, order.enqueued, order.waiting, order.pending)
            == (later.behind, later.enqueued, later.waiting, later.pending)
        )
        if order.behind and not is_steady:
            order = _without_behind(later or order)  # noqa: PLW2901 - what is known of it
        if order.furthest:
            found.append(order)
    return sorted(found, key=lambda order: (not order.behind, order.number))


def _without_behind(order: GroupOrder) -> GroupOrder:
    if not order.behind:
        return order
    return replace(order, behind=(), waiting=(), pending=None, operation="", sizes="")


def _orders(
    groups: Mapping[int, Sequence[m.ProcessGroup]], world: Sequence[int]
) -> dict[str, GroupOrder]:
    by_number: dict[str, dict[int, m.ProcessGroup]] = {}
    for rank, found in groups.items():
        for group in found:
            by_number.setdefault(group.number, {})[rank] = group
    return {number: _order(number, members, world) for number, members in by_number.items()}


def _order(number: str, members: Mapping[int, m.ProcessGroup], world: Sequence[int]) -> GroupOrder:
    begun = {rank: max(0, group.enqueued) for rank, group in members.items()}
    lowest, highest = min(begun.values()), max(begun.values())
    behind = [rank for rank, last in begun.items() if last == lowest < highest]
    pending = {rank: group for rank, group in members.items() if group.pending is not None}
    waiting: dict[int, m.ProcessGroup] = {}
    if behind:  # those in the first collective that the others have not begun
        waiting = {rank: each for rank, each in pending.items() if (each.pending or 0) > lowest}
        if not waiting and highest - lowest == 1:  # read at different times
            behind = []
    elif len(pending) == len(members):
        waiting = pending
    first = min(waiting.values(), key=lambda each: each.pending or 0, default=None)
    names = [group.name for group in members.values()]
    return GroupOrder(
        number=number,
        name=next((name for name in names if name and name != _NO_DESCRIPTION), ""),
        ranks=tuple(sorted(members)),
        is_whole=len(members) >= len(world) > 0,
        behind=tuple(sorted(behind)),
        enqueued=lowest,
        furthest=highest,
        waiting=tuple(
            sorted(
                rank for rank, each in waiting.items() if first and each.pending == first.pending
            )
        ),
        pending=None if first is None else first.pending,
        operation="" if first is None else first.operation,
        sizes="" if first is None else first.sizes,
    )
