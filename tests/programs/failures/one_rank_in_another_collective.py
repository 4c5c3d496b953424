# expect-rank: 3
# expect-exit: 1
# expect-cause: called torch.distributed broadcast while ranks 0-2 called torch.distributed all_reduce: gloo timed out after 3 s
"""Rank 3 takes another branch and broadcasts while the others reduce: all time out."""

import torch
import torch.distributed as dist
from _group import RANK, join, steps

join(timeout_s=3)
steps(2)
if RANK == 3:
    dist.broadcast(torch.ones(4), src=0)
    dist.barrier()
else:
    dist.all_reduce(torch.ones(8))
