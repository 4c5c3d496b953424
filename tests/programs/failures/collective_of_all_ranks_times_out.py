# expect-rank: 2
# expect-exit: 1
# expect-cause: did not come to the all_reduce that ranks 0-1,3 waited in: gloo timed out after 2 s
"""Rank 2 never reaches the collective: the others time out, and the report says that they only waited."""

from _group import RANK, join, sleep_until_stopped, steps

join(timeout_s=2)
steps(2)
if RANK == 2:
    sleep_until_stopped()
steps(10**9)
