# expect-rank: 1
# expect-exit: 139
# expect-cause: SIGSEGV
# expect-frame: segfault_with_faulthandler.py:14 in native_kernel
"""One rank reads address 0 with faulthandler on: the Python line is known."""

import ctypes
import faulthandler

from _group import RANK, join, steps


def native_kernel() -> None:
    ctypes.string_at(0)


faulthandler.enable()
join()
steps(3)
if RANK == 1:
    native_kernel()
steps(10**9)
