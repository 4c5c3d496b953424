# expect-rank: 3
# expect-exit: 1
# expect-cause: can't allocate memory
# expect-hint: host memory
"""The CPU allocator of torch cannot have what it wants: host memory, not GPU memory."""

import torch
from _group import RANK, join, steps

join()
steps(2)
if RANK == 3:
    torch.empty(1 << 50)
steps(10**9)
