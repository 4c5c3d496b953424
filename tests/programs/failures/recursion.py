# expect-rank: 1
# expect-exit: 1
# expect-cause: RecursionError: maximum recursion depth exceeded
# expect-frame: recursion.py:11 in descend
"""Endless recursion."""

from _group import RANK, sleep_until_stopped


def descend(depth: int) -> int:
    return descend(depth + 1) + 1


if RANK == 1:
    descend(0)
sleep_until_stopped()
