# expect-rank: 2
# expect-exit: 1
# expect-cause: did not come to the barrier that ranks 0-1,3 waited for: monitoredBarrier timed out after 2 s
# expect-frame: monitored_barrier_missed.py:16 in evaluate
"""Rank 2 evaluates longer than the others wait in monitored_barrier."""

import time
from datetime import timedelta

import torch.distributed as dist
from _group import RANK, join, steps


def evaluate() -> None:
    if RANK == 2:
        time.sleep(40)


join()
steps(2)
evaluate()
dist.monitored_barrier(timeout=timedelta(seconds=2))
