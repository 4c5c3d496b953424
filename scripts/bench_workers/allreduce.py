"""Import torch, form a gloo group, add up one tensor over all ranks, and say when that was done."""

import os
import time

import common
import torch
import torch.distributed as dist

os.environ.setdefault("RANK", str(common.RANK))
os.environ.setdefault("WORLD_SIZE", str(common.WORLD_SIZE))
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # mpirun sets neither of these two
os.environ.setdefault("MASTER_PORT", os.environ["BENCH_PORT"])
dist.init_process_group("gloo")
total = torch.tensor([float(common.RANK)])
dist.all_reduce(total)
if total.item() != sum(range(common.WORLD_SIZE)):
    raise SystemExit(f"the sum is {total.item()}")
common.stamp("reduced", time.monotonic_ns())
dist.barrier()
dist.destroy_process_group()
