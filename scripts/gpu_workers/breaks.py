"""Fail on the GPU: ``memory`` asks for more than it has, ``assert`` has a kernel find an index out
of range."""

import sys

import torch

device = torch.device("cuda")
numbers = torch.zeros(4, device=device)
if sys.argv[1] == "memory":
    _, total = torch.cuda.mem_get_info()
    torch.empty(2 * total, dtype=torch.uint8, device=device)
else:
    print(numbers[torch.tensor([7], device=device)].sum().item())
