"""How workers are dealt out to nodes, and Horovod's cross ranks; pure arithmetic.

Nodes are given as numbers of slots, in topology order. Ranks are contiguous per node, whatever the placement.
"""

from __future__ import annotations

from collections.abc import Sequence


def pack(total: int, slots: Sequence[int]) -> list[int]:
    """Fill each node before the next one; gives the workers of each node. There must be slots enough."""
    left = total
    counts: list[int] = []
    for own in slots:
        counts.append(min(own, left))
        left -= counts[-1]
    return counts


def spread(total: int, slots: Sequence[int]) -> list[int]:
    """Give one worker to each node in turn, as long as it has room; gives the workers of each node.

    There must be slots enough.
    """
    counts = [0] * len(slots)
    left, level = total, 0
    while left > 0:
        room = [place for place, own in enumerate(slots) if own > level]
        # As many whole rounds as all that have room can take, else one that ends in the middle.
        rounds = max(1, min(min(slots[place] for place in room) - level, left // len(room)))
        for place in room[:left]:
            counts[place] += rounds
        left -= rounds * min(len(room), left)
        level += rounds
    return counts


def cross_sizes(slots: Sequence[int]) -> tuple[int, ...]:
    """Give for each local rank how many nodes have a worker of it: Horovod's CROSS_SIZE.

    Slots 3, 1, 2 give 3, 2, 1.
    """
    most = max(slots, default=0)
    ending = [0] * (most + 1)
    for own in slots:
        ending[own] += 1
    sizes: list[int] = []
    nodes = len(slots) - ending[0]
    for local_rank in range(most):
        sizes.append(nodes)
        nodes -= ending[local_rank + 1]
    return tuple(sizes)


def cross_ranks(slots: Sequence[int]) -> list[tuple[int, ...]]:
    """Give for each node its workers' places among those of the same local rank: Horovod's CROSS_RANK.

    Slots 3, 1, 2 give (0, 0, 0), (1,), (2, 1): of the two workers with local rank 1, the third node's is the second.
    """
    before = [0] * max(slots, default=0)
    ranks: list[tuple[int, ...]] = []
    for own in slots:
        ranks.append(tuple(before[:own]))
        for local_rank in range(own):
            before[local_rank] += 1
    return ranks
