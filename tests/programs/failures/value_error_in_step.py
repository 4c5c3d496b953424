# expect-rank: 2
# expect-exit: 1
# expect-cause: ValueError: loss is nan at step 3
# expect-frame: value_error_in_step.py:13 in step
"""One rank raises in its third step, the others are in all_reduce and lose it."""

from _group import RANK, join, steps


def step(number: int) -> None:
    steps(1)
    if RANK == 2 and number == 3:
        raise ValueError(f"loss is nan at step {number}")


join()
for n in range(10**9):
    step(n)
