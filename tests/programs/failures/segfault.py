# expect-rank: 1
# expect-exit: 139
# expect-cause: SIGSEGV
"""One rank reads address 0."""

import ctypes

from _group import RANK, join, steps

join()
steps(3)
if RANK == 1:
    ctypes.string_at(0)
steps(10**9)
