# expect-rank: 1
# expect-exit: 1
# expect-cause: FloatingPointError: gradient of layer 0 is not finite
# expect-frame: ddp_rank_fails_in_backward.py:18 in check
"""DistributedDataParallel: one rank fails in a gradient hook, the others lose it within their own backward."""

import torch
from _group import RANK, join
from torch.nn.parallel import DistributedDataParallel

join()
model = DistributedDataParallel(torch.nn.Linear(4, 2))


def check(gradient: torch.Tensor) -> None:
    """Stand for a check that a user adds."""
    if RANK == 1 and step == 2:
        raise FloatingPointError("gradient of layer 0 is not finite")


step = 0
model.module.weight.register_hook(check)
while True:
    model(torch.ones(3, 4)).sum().backward()
    step += 1
