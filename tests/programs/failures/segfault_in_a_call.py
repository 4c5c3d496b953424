# expect-rank: 1
# expect-exit: 139
# expect-cause: SIGSEGV
# expect-frame: segfault_in_a_call.py:13 in tokenize
"""Native code crashes below a Python function. Nothing asks for a stack; distlaunch's bootstrap does."""

import ctypes

from _group import RANK, sleep_until_stopped


def tokenize() -> None:
    ctypes.string_at(8)


if RANK == 1:
    tokenize()
sleep_until_stopped()
