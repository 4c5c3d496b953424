# expect-rank: 2
# expect-exit: 1
# expect-cause: timed out waiting for it
"""Rank 2 never reaches the collective: the others time out, and the report says that they only waited."""

from _group import RANK, join, sleep_until_stopped, steps

join(timeout_s=2)
steps(2)
if RANK == 2:
    sleep_until_stopped()
steps(10**9)
