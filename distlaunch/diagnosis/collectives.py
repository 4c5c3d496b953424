"""Find the rank that is behind from the ranks' records of their collectives. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distlaunch.core.model.record import Record
from distlaunch.core.model.text import name_ranks, printable
from distlaunch.core.protocol import agent_messages as m


class GroupOrder(Record):
    """How far the ranks of one process group have come, at one moment."""

    number: str
    name: str
    """Description or name of the group; empty if not known."""
    behind: tuple[int, ...]
    """The ranks that have begun fewer collectives than others."""
    enqueued: int
    """The last collective that those ranks have begun; of all ranks if none is behind."""
    waiting: tuple[int, ...]
    """The ranks in the collective that the ranks behind have not begun."""
    pending: int | None
    """The number of that collective, or of the one in which all ranks are."""
    operation: str
    sizes: str
    """Shapes of its tensors as JSON."""

    @property
    def words(self) -> str:
        """Text that says which ranks are behind, and in which collective the others wait."""
        group = f"process group {printable(self.name or self.number)}"
        what = f"collective {self.pending}" if self.operation else "a collective"
        if self.operation:
            what += f", {printable(self.operation)} of {printable(self.sizes)}"
        if self.behind:
            verb = "is" if len(self.behind) == 1 else "are"
            waits = f"; {name_ranks(self.waiting)} in {what}" if self.waiting else ""
            return f"{group}: {name_ranks(self.behind)} {verb} behind, after collective {self.enqueued}{waits}"
        if self.pending is not None:
            return f"{group}: all ranks are in {what}"
        return f"{group}: all ranks are after collective {self.enqueued}"


def group_orders(groups: Mapping[int, Sequence[m.ProcessGroup]]) -> list[GroupOrder]:
    """Return the order in each process group, those with ranks that are behind first.

    ``groups`` has the process groups of each rank that has answered.
    """
    by_number: dict[str, dict[int, m.ProcessGroup]] = {}
    for rank, found in groups.items():
        for group in found:
            by_number.setdefault(group.number, {})[rank] = group
    orders = [_order(number, members) for number, members in by_number.items()]
    return sorted(orders, key=lambda order: (not order.behind, order.number))


def _order(number: str, members: Mapping[int, m.ProcessGroup]) -> GroupOrder:
    """Return the order in the process group with this number."""
    lowest = min(group.enqueued for group in members.values())
    highest = max(group.enqueued for group in members.values())
    behind = [rank for rank, group in members.items() if group.enqueued == lowest < highest]
    pending = {rank: group for rank, group in members.items() if group.pending is not None}
    waiting: dict[int, m.ProcessGroup] = {}
    if behind:  # those in the first collective that the others have not begun
        waiting = {rank: each for rank, each in pending.items() if (each.pending or 0) > lowest}
    elif len(pending) == len(members):
        waiting = pending
    first = min(waiting.values(), key=lambda each: each.pending or 0, default=None)
    return GroupOrder(
        number=number,
        name=next((group.name for group in members.values() if group.name), ""),
        behind=tuple(sorted(behind)),
        enqueued=lowest,
        waiting=tuple(
            sorted(
                rank for rank, each in waiting.items() if first and each.pending == first.pending
            )
        ),
        pending=None if first is None else first.pending,
        operation="" if first is None else first.operation,
        sizes="" if first is None else first.sizes,
    )
