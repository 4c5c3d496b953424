# expect-rank: 2
# expect-exit: 1
# expect-cause: ended with exit code 0 before the all_reduce that ranks 0-1,3 waited in
# expect-hint: same number of steps
"""Rank 2 has fewer batches and ends with 0: nobody raised first, the others lost it."""

import os

from _group import RANK, join, steps

join()
steps(3)
if RANK == 2:
    os._exit(0)
steps(10**9)
