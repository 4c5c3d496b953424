# expect-rank: 0
# expect-exit: 1
# expect-cause: RuntimeError: mat1 and mat2 shapes cannot be multiplied
# expect-frame: shape_mismatch_one_rank.py:13 in forward
"""A RuntimeError of torch that is a cause, among RuntimeErrors of torch that are consequences."""

import torch
from _group import RANK, join, steps


def forward(width: int) -> torch.Tensor:
    model = torch.nn.Linear(8, 2)
    return model(torch.ones(4, width))


join()
steps(2)
forward(9 if RANK == 0 else 8)
steps(10**9)
