# expect-rank: all
# expect-exit: 1
# expect-cause: AssertionError: batch size 30 is not divisible by 4
# expect-frame: assertion_on_all_ranks.py:13 in check
"""The same assertion fails on every rank at the same step."""

import time

from _group import WORLD_SIZE, join, steps


def check(batch: int) -> None:
    assert batch % WORLD_SIZE == 0, f"batch size {batch} is not divisible by {WORLD_SIZE}"


join()
steps(2)
time.sleep(0.2)
check(30)
