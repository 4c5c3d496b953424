"""Folding when a lot is pending: whole blocks of lines, no Python work for each line.

Splitting, comparing and joining run in C over lists of lines; Python is run per stretch of equal or of different
lines. Lines are paired by position; where the ranks are out of step, their first lines are looked for in each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from operator import eq

HOLD_S = 0.1
"""How long a line may wait for the same line from other ranks (design: 0.1 s at most)."""

Emit = Callable[["int | frozenset[int]", "list[bytes]"], None]
"""Takes a rank, or the ranks that share the lines, and lines without their newline."""

_ALIGN_TRIES = 8


class _Queue:
    """The pending lines of one rank and when they came: ``births`` holds [time, lines, weight] of each block."""

    __slots__ = ("births", "lines", "weight")

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.births: deque[list[float]] = deque()
        self.weight = 0.0

    def add(self, lines: list[bytes], weight: float, born: float) -> None:
        self.lines += lines
        self.births.append([born, len(lines), weight])
        self.weight += weight

    def take(self, count: int) -> list[bytes]:
        lines = self.lines[:count]
        del self.lines[:count]
        while count:
            birth = self.births[0]
            part = min(count, int(birth[1]))
            share = birth[2] * part / birth[1]
            birth[1] -= part
            birth[2] -= share
            self.weight -= share
            count -= part
            if not birth[1]:
                self.births.popleft()
        return lines


class BlockFolder:
    """Blocks of lines from several ranks; truthy while lines are pending."""

    def __init__(self, emit: Emit, *, capacity: int) -> None:
        self._emit = emit
        self._capacity = capacity
        self._queues: dict[int, _Queue] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, rank: int, lines: list[bytes], weight: float, born: float) -> None:
        """Queue lines of a rank; ``settle`` and ``relieve`` decide what is shown."""
        queue = self._queues.get(rank)
        if queue is None:
            queue = self._queues[rank] = _Queue()
        queue.add(lines, weight, born)

    def settle(self, alive: set[int]) -> None:
        """Show what can be paired: as many lines of each rank as all have; nothing while a live rank has none."""
        queues = self._queues
        if len(queues) < len(alive) or not queues.keys() >= alive:
            return
        if len(queues) == 1:
            self.flush()
            return
        self._align()
        count = min(len(queue.lines) for queue in queues.values())
        if count:
            mask = self._mask(count)
            taken = {rank: queue.take(count) for rank, queue in queues.items()}
            self._show(taken, mask)
        self._queues = {rank: queue for rank, queue in queues.items() if queue.lines}

    def relieve(self) -> None:
        """Keep memory bounded: show the ranks that have most pending, unpaired, until half of the capacity is left."""
        total = sum(queue.weight for queue in self._queues.values())
        if total <= self._capacity:
            return
        for rank in sorted(self._queues, key=lambda rank: -self._queues[rank].weight):
            total -= self._queues[rank].weight
            self._emit(rank, self._queues.pop(rank).lines)
            if total <= self._capacity / 2:
                return

    def flush_due(self, now: float) -> float | None:
        """Show what has waited for HOLD_S; return when the next lines will have."""
        due: float | None = None
        for rank, queue in list(self._queues.items()):
            count = 0
            for born, lines, _weight in queue.births:
                if born + HOLD_S > now:
                    due = born + HOLD_S if due is None else min(due, born + HOLD_S)
                    break
                count += int(lines)
            if count:
                self._emit(rank, queue.take(count))
                if not queue.lines:
                    del self._queues[rank]
        return due

    def release(self, rank: int) -> None:
        """Show all lines of one rank."""
        queue = self._queues.pop(rank, None)
        if queue is not None:
            self._emit(rank, queue.lines)

    def flush(self) -> None:
        """Show all that is pending, rank by rank."""
        queues, self._queues = self._queues, {}
        for rank, queue in queues.items():
            self._emit(rank, queue.lines)

    def _align(self) -> None:
        """Bring ranks that are out of step together: look for a first line of one rank that all have pending."""
        queues = self._queues
        heads = dict.fromkeys(queue.lines[0] for queue in queues.values())
        if len(heads) == 1:
            return
        for head in islice(heads, _ALIGN_TRIES):
            try:
                leads = [(rank, queue.lines.index(head)) for rank, queue in queues.items()]
            except ValueError:
                continue
            for rank, lead in leads:
                if lead:
                    self._emit(rank, queues[rank].take(lead))
            return

    def _mask(self, count: int) -> bytes:
        """Give one byte per line position: 1 where all ranks have the same line."""
        first, *others = [queue.lines for queue in self._queues.values()]
        masks = [bytes(map(eq, islice(first, count), other)) for other in others]
        if len(masks) == 1:
            return masks[0]
        same = int.from_bytes(masks[0], "big")
        for mask in masks[1:]:
            same &= int.from_bytes(mask, "big")
        return same.to_bytes(count, "big")

    def _show(self, taken: dict[int, list[bytes]], mask: bytes) -> None:
        everyone = frozenset(taken)
        first = next(iter(taken.values()))
        start = 0
        while start < len(mask):
            same = mask[start]
            end = mask.find(1 - same, start)
            if end < 0:
                end = len(mask)
            if same:
                self._emit(everyone, first[start:end])
            else:
                for rank, lines in taken.items():
                    self._emit(rank, lines[start:end])
            start = end
