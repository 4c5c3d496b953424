"""A worker on a Ray cluster: forms a group, tells of itself, and does what its first word says in the first attempt."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))
import survivor

survivor.hold()
rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("gloo")
total = torch.tensor(float(rank))
dist.all_reduce(total)
names = ("WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
print("told", rank, attempt, int(total), *(os.environ.get(name) or "-" for name in names), flush=True)
what = "".join(sys.argv[1:]) if attempt == "0" else ""
if what == "fail" and rank == 1:
    raise RuntimeError("this rank fails")
if what == "save":

    def save(*_):
        time.sleep(8)
        print("saved", rank, flush=True)
        sys.exit(0)

    signal.signal(signal.SIGTERM, save)
if what:
    print("waits", flush=True)
    signal.pause()
dist.monitored_barrier()
dist.destroy_process_group()
