"""The same line from several ranks becomes one, and no rank's own order ever changes.

Pending lines form one sequence of groups. A rank's next line joins the first group of that text that stands after the
rank's previous line, else it opens a new group at the end; groups leave from the front. So each rank's lines leave in
the order in which they came. A group that every live rank has joined takes all groups before it along: nobody could
join those any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from distlaunch.console.blocks import HOLD_S, BlockFolder, Emit
from distlaunch.console.repeated_blocks import alike, without_rank

LINE_COST = 48
"""What a pending line costs beside its bytes: object header and list slot, roughly."""
_BULK_CHUNK = 16 << 10
_BULK_PENDING = 64 << 10
"""A chunk or a backlog of this weight is compared in blocks, without Python work for each line."""
_CAPACITY_PER_RANK = 512 << 10
"""What may wait for other ranks: a chunk of the pump's from each, and some."""
_CAPACITY = (1 << 20, 8 << 20)


class _Group:
    __slots__ = ("born", "key", "others", "ranks", "seq", "text", "weight")

    def __init__(self, seq: int, key: bytes, text: bytes, rank: int, born: float) -> None:
        self.seq = seq
        self.key = key
        """What the lines of all ranks have in common; see ``repeats.alike``."""
        self.text = text
        self.ranks = {rank}
        self.born = born
        self.weight = len(text) + LINE_COST
        self.others: dict[int, bytes] = {}
        """The lines of ranks that wrote them a little differently."""


class Folder:
    """Holds lines of several ranks for at most HOLD_S, and hands them on folded."""

    def __init__(self, ranks: Iterable[int], emit: Emit) -> None:
        self._alive = set(ranks)
        self._emit = emit
        self._groups: deque[_Group] = deque()
        self._by_text: dict[bytes, list[_Group]] = {}
        self._last: dict[int, int] = {}
        self._seq = 0
        self._weight = 0
        low, high = _CAPACITY
        self._blocks = BlockFolder(emit, capacity=max(low, min(high, _CAPACITY_PER_RANK * len(self._alive))))

    def add(self, rank: int, block: bytes, now: float) -> None:
        """Take whole lines, newline between them and none at the end."""
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
        """No longer wait for this rank: what only it was missing from is handed on."""
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
        """Hand on what has waited for HOLD_S; return when the next lines will have."""
        if self._blocks:
            return self._blocks.flush_due(now)
        groups = self._groups
        while groups and groups[0].born + HOLD_S <= now:
            self._emit_first()
        return groups[0].born + HOLD_S if groups else None

    def release(self, rank: int) -> None:
        """Hand on all lines of this rank, and what must go before them."""
        if self._blocks:
            self._blocks.release(rank)
        elif self._groups and (last := self._last.get(rank, -1)) >= self._groups[0].seq:
            self._emit_through(last)

    def flush(self) -> None:
        """Hand on everything."""
        while self._groups:
            self._emit_first()
        self._blocks.flush()

    def _add_lines(self, rank: int, lines: list[bytes], now: float) -> None:
        last = self._last.get(rank, -1)
        for text in lines:
            key = alike(text)
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
        """Undo the grouping, so that the blocks hold every rank's lines in step."""
        pending: dict[int, list[_Group]] = {}
        for group in self._groups:
            for rank in group.ranks:
                pending.setdefault(rank, []).append(group)
        self._groups.clear()
        self._by_text.clear()
        self._weight = 0
        for rank, groups in pending.items():
            texts = [group.others.get(rank, group.text) for group in groups]
            self._blocks.add(rank, texts, sum(map(len, texts)) + LINE_COST * len(texts), groups[0].born)
