# expect-rank: 1
# expect-exit: 1
# expect-cause: called REDUCE [8] while ranks 0
"""Rank 1 calls another collective: torch's check names both sides on every rank, if it comes to that before the others are gone."""

import os

os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"

import torch
import torch.distributed as dist
from _group import RANK, join, steps

join(timeout_s=3)
steps(1)
if RANK == 1:
    dist.reduce(torch.ones(8), dst=0)
else:
    dist.all_reduce(torch.ones(8))
