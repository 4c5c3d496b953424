"""Join equal lines of several ranks without changing the order of any rank's lines.

``LineFolder`` compares line by line while few lines are pending. A group is a line with the ranks
that wrote it. A rank's next line joins the first group with the same text after the group of the
rank's previous line. If there is none, the line becomes a new group after all others. Groups are
emitted in their order. A group that contains all live ranks is complete, and is emitted with all
groups before it.

``BlockFolder`` is used while many lines are pending. It compares lists of lines in C; Python code
runs once per run of consecutive lines that are all equal or all different. Lines are paired by
position. If the ranks are out of step, the first lines of each rank are searched in the pending
lines of the other ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from operator import eq

from distlaunch.console.repeated_blocks import comparison_key, without_rank

HOLD_S = 0.1
"""How long a line may wait for other ranks."""

Emit = Callable[["int | frozenset[int]", "list[bytes]"], None]
"""Called with a rank, or the ranks that share the lines, and the lines without newlines."""

LINE_COST = 48
"""Memory of a pending line besides its bytes."""
_BULK_CHUNK = 16 << 10
_BULK_PENDING = 64 << 10
"""Pending lines that take more memory are compared in blocks."""
_CAPACITY_PER_RANK = 512 << 10
"""Bytes per rank that may wait for other ranks, a little more than one chunk."""
_CAPACITY = (1 << 20, 8 << 20)
_ALIGN_TRIES = 8


class _Group:
    __slots__ = ("born", "key", "others", "ranks", "seq", "text", "weight")

    def __init__(self, seq: int, key: bytes, text: bytes, rank: int, born: float) -> None:
        self.seq = seq
        self.key = key
        """The value that is equal for all lines of the group (``repeated_blocks.comparison_key``).
        """
        self.text = text
        self.ranks = {rank}
        self.born = born
        self.weight = len(text) + LINE_COST
        self.others: dict[int, bytes] = {}
        """Lines that differ from ``text`` although their key is equal, by rank."""


class LineFolder:
    """Holds lines of several ranks for at most HOLD_S, and emits equal lines once."""

    def __init__(self, ranks: Iterable[int], emit: Emit) -> None:
        self._alive = set(ranks)
        self._emit = emit
        self._groups: deque[_Group] = deque()
        self._by_text: dict[bytes, list[_Group]] = {}
        self._last: dict[int, int] = {}
        self._seq = 0
        self._weight = 0
        low, high = _CAPACITY
        self._blocks = BlockFolder(
            emit, capacity=max(low, min(high, _CAPACITY_PER_RANK * len(self._alive)))
        )

    def add(self, rank: int, block: bytes, now: float) -> None:
        """Add complete lines of a rank. ``block`` has newlines between them but not at the end."""
        lines = block.split(b"\n")
        weight = len(block) + LINE_COST * len(lines)
        self._alive.add(rank)
        if not self._blocks:
            if weight < _BULK_CHUNK and self._weight < _BULK_PENDING:
                self._add_lines(rank, lines, now)
                return
            self._move_to_blocks()
        self._blocks.add(rank, lines, weight, now)
        self._blocks.settle(self._alive)
        self._blocks.relieve()

    def ended(self, rank: int) -> None:
        """Record that a rank has ended. Emit the lines that waited only for it."""
        self._alive.discard(rank)
        if not self._alive:
            self.flush()
            return
        self._blocks.settle(self._alive)
        for group in reversed(self._groups):
            if group.ranks >= self._alive:
                self._emit_through(group.seq)
                return

    def flush_due(self, now: float) -> float | None:
        """Emit lines that have been held for HOLD_S. Return when the next are due."""
        if self._blocks:
            return self._blocks.flush_due(now)
        groups = self._groups
        while groups and groups[0].born + HOLD_S <= now:
            self._emit_first()
        return groups[0].born + HOLD_S if groups else None

    def release(self, rank: int) -> None:
        """Emit all lines of a rank, and the lines that must precede them."""
        if self._blocks:
            self._blocks.release(rank)
        elif self._groups and (last := self._last.get(rank, -1)) >= self._groups[0].seq:
            self._emit_through(last)

    def flush(self) -> None:
        """Emit all lines."""
        while self._groups:
            self._emit_first()
        self._blocks.flush()

    def _add_lines(self, rank: int, lines: list[bytes], now: float) -> None:
        last = self._last.get(rank, -1)
        for text in lines:
            key = comparison_key(text)
            known = self._by_text.get(key)
            if known is None:
                known = self._by_text[key] = []
            for group in known:
                if group.seq > last:
                    group.ranks.add(rank)
                    if group.text != text:
                        group.others[rank] = text
                    break
            else:
                group = _Group(self._seq, key, text, rank, now)
                self._seq += 1
                known.append(group)
                self._groups.append(group)
                self._weight += group.weight
            last = group.seq
            if len(group.ranks) >= len(self._alive) and group.ranks >= self._alive:
                self._emit_through(last)
        self._last[rank] = last

    def _emit_through(self, seq: int) -> None:
        while self._groups and self._groups[0].seq <= seq:
            self._emit_first()

    def _emit_first(self) -> None:
        group = self._groups.popleft()
        self._forget(group)
        ranks = group.ranks
        text = without_rank(group.text) if group.others else group.text
        self._emit(next(iter(ranks)) if len(ranks) == 1 else frozenset(ranks), [text])

    def _forget(self, group: _Group) -> None:
        same = self._by_text[group.key]
        del same[0]
        if not same:
            del self._by_text[group.key]
        self._weight -= group.weight

    def _move_to_blocks(self) -> None:
        pending: dict[int, list[_Group]] = {}
        for group in self._groups:
            for rank in group.ranks:
                pending.setdefault(rank, []).append(group)
        self._groups.clear()
        self._by_text.clear()
        self._weight = 0
        for rank, groups in pending.items():
            texts = [group.others.get(rank, group.text) for group in groups]
            self._blocks.add(
                rank, texts, sum(map(len, texts)) + LINE_COST * len(texts), groups[0].born
            )


class _Queue:
    """Pending lines of one rank. ``births`` has [time of arrival, number of lines, memory] of each
    block."""

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
    """Joins equal lines of several ranks in blocks. True while lines are pending."""

    def __init__(self, emit: Emit, *, capacity: int) -> None:
        self._emit = emit
        self._capacity = capacity
        self._queues: dict[int, _Queue] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, rank: int, lines: list[bytes], weight: float, born: float) -> None:
        """Queue lines of a rank.

        ``weight`` is their memory in bytes, ``born`` the time at which they arrived.
        """
        queue = self._queues.get(rank)
        if queue is None:
            queue = self._queues[rank] = _Queue()
        queue.add(lines, weight, born)

    def settle(self, alive: set[int]) -> None:
        """Emit as many lines as all ranks have, if each live rank has some.

        A live rank without lines delays the others.
        """
        queues = self._queues
        if len(queues) < len(alive) or not queues.keys() >= alive:
            return
        if len(queues) == 1:
            self.flush()
            return
        self._align()
        count = min(len(queue.lines) for queue in queues.values())
        if count:
            mask = self._equal_mask(count)
            taken = {rank: queue.take(count) for rank, queue in queues.items()}
            self._emit_by_mask(taken, mask)
        self._queues = {rank: queue for rank, queue in queues.items() if queue.lines}

    def relieve(self) -> None:
        """Emit lines of the ranks with most of them until half of the capacity is used."""
        total = sum(queue.weight for queue in self._queues.values())
        if total <= self._capacity:
            return
        for rank in sorted(self._queues, key=lambda rank: -self._queues[rank].weight):
            total -= self._queues[rank].weight
            self._emit(rank, self._queues.pop(rank).lines)
            if total <= self._capacity / 2:
                return

    def flush_due(self, now: float) -> float | None:
        """Emit lines that have been held for HOLD_S. Return when the next are due."""
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
        """Emit all lines of one rank."""
        queue = self._queues.pop(rank, None)
        if queue is not None:
            self._emit(rank, queue.lines)

    def flush(self) -> None:
        """Emit all lines."""
        queues, self._queues = self._queues, {}
        for rank, queue in queues.items():
            self._emit(rank, queue.lines)

    def _align(self) -> None:
        """Find a first line of one rank that is pending for all ranks, and emit the lines before
        it."""
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

    def _equal_mask(self, count: int) -> bytes:
        """Return for each position 1 if all ranks have the same line there."""
        first, *others = [queue.lines for queue in self._queues.values()]
        masks = [bytes(map(eq, islice(first, count), other)) for other in others]
        if len(masks) == 1:
            return masks[0]
        same = int.from_bytes(masks[0], "big")
        for mask in masks[1:]:
            same &= int.from_bytes(mask, "big")
        return same.to_bytes(count, "big")

    def _emit_by_mask(self, taken: dict[int, list[bytes]], mask: bytes) -> None:
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
