# expect-rank: 0
# expect-exit: 1
# expect-cause: IndexError: list index out of range
# expect-frame: spawned_child_fails.py:13 in child
"""A rank starts helpers with torch.multiprocessing.spawn; one of them fails."""

import torch.multiprocessing as mp
from _group import RANK, join, steps


def child(index: int, sizes: list[int]) -> None:
    if index == 1:
        sizes[7]


if __name__ == "__main__":
    join(60)  # the helpers import torch first
    steps(2)
    if RANK == 0:
        mp.spawn(child, args=([1, 2],), nprocs=2)
    steps(10**9)
