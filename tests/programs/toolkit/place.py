"""Say what init() found, use the group, and end as asked: `end`, `raise`, `exit`, `late` or `hang`."""

import os
import random
import select
import sys

import numpy
import torch
import torch.distributed as dist

from distlaunch.toolkit import context as module
from distlaunch.toolkit import init

how = sys.argv[1]
module.END_S = 0.5 if how == "late" else 3600.0  # a wait that is not wanted is one that the test does not survive
context = init(seed=7)
assert context is init()
pid = torch.tensor([os.getpid()])
pids = [torch.zeros_like(pid) for _ in range(context.world_size)]
dist.all_gather(pids, pid)
total = torch.tensor([context.rank + 1.0], device=context.device)
dist.all_reduce(total)
print(
    f"rank {context.rank} of {context.world_size}, local {context.local_rank} of {context.local_world_size},"
    f" {context.device} {context.backend} {context.strategy} attempt {context.attempt}, sum {total.item():.0f}",
    flush=True,
)
print("drawn", context.seed, random.random(), numpy.random.random(), torch.rand(1).item(), flush=True)
if how == "raise" and context.rank == context.world_size - 1:
    raise KeyError("asked to fail")
if how == "exit" and context.rank == context.world_size - 1:
    with context:
        sys.exit(3)
if how in {"raise", "exit"} and context.world_size > 1:
    dist.all_reduce(total)  # which the last one never joins
if how == "late" and context.rank == 1:
    first = os.pidfd_open(int(pids[0]))
    select.select([first], [], [])
    print("rank 0 has ended", flush=True)
if how == "hang" and context.rank == 1:
    select.select([], [], [])
if how == "hang":
    dist.all_reduce(total)
