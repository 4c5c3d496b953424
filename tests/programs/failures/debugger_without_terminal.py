# expect-rank: all
# expect-exit: 1
# expect-cause: bdb.BdbQuit
# expect-hint: --num-procs 1
"""A breakpoint in several workers, which have no terminal: the debugger reads the end of its input and quits."""

from _group import RANK


def step() -> int:
    breakpoint()
    return RANK


step()
