"""A worker on a Ray cluster: tells of itself, and in the first attempt does what one of its words says.

With the word ``reduce`` it forms a group with the others, which is what imports torch.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import survivor

SAVING_S = 3.0  # longer than the grace of workers whose agent is lost


def reduced(rank: int) -> int:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    dist.monitored_barrier()
    dist.destroy_process_group()
    return int(total)


def save(*_):
    time.sleep(SAVING_S)
    print("saved", rank, flush=True)
    sys.exit(0)


survivor.hold()
words = sys.argv[1:]
rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
total = reduced(rank) if "reduce" in words else "-"
names = ("WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
print("told", rank, attempt, total, *(os.environ.get(name) or "-" for name in names), flush=True)
what = next((word for word in words if word != "reduce"), None)
if what is not None and attempt == "0":
    if what == "fail" and rank == 1:
        raise RuntimeError("this rank fails")
    if what == "save":
        signal.signal(signal.SIGTERM, save)
    print("waits", flush=True)
    signal.pause()
