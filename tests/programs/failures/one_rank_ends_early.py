# expect-rank: 0,1,3
# expect-exit: 1
# expect-cause: no rank shows the original cause
# expect-hint: rank 2
"""Rank 2 has fewer batches and ends with 0: nobody raised first, the others lost it."""

import os

from _group import RANK, join, steps

join()
steps(3)
if RANK == 2:
    os._exit(0)
steps(10**9)
