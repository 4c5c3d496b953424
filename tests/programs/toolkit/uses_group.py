"""Print the context of init(), use the group, and end as asked: `end`, `raise`, `exit`, `late` (a rank), `leave` or `hang`.

The backend may follow.
"""

import os
import random
import select
import sys

import numpy
import torch
import torch.distributed as dist

from distlaunch.toolkit import wait_at_end
from distlaunch.toolkit import init

how, backend = sys.argv[1], (sys.argv[2:] or [None])[0]
# A wait that is not wanted is one that the test does not survive.
wait_at_end.END_S = 0.5 if how.startswith(("late", "leave")) else 3600.0
context = init(seed=7, backend=backend)
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
if how == f"late{context.rank}":
    other = os.pidfd_open(int(pids[1 - context.rank]))
    select.select([other], [], [])
    print("the other has ended", flush=True)
if how == "leave" and context.rank == 1:
    sys.exit(1)
if how == "leave":
    try:
        dist.all_reduce(total)
    except RuntimeError:
        print("refused", flush=True)
        raise
    print("paired with something else:", total.item(), flush=True)
if how == "hang" and context.rank == 1:
    select.select([], [], [])
if how == "hang":
    dist.all_reduce(total)
