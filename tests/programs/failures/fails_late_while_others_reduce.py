# expect-rank: 2
# expect-exit: 1
# expect-cause: ZeroDivisionError: division by zero
# expect-frame: fails_late_while_others_reduce.py:13 in mean
"""Rank 2 computes for a while before it fails; the others have been waiting in all_reduce for it."""

import time

from _group import RANK, join, steps


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


join()
steps(3)
if RANK == 2:
    time.sleep(1)
    mean([])
steps(10**9)
