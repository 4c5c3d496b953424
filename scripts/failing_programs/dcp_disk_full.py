# workers: 3
# expect-rank: 2
# expect-cause: No space left on device | file write failed | unexpected pos
# expect-hint: disk | space
# misleads: firewall
"""A distributed checkpoint: the file of rank 2 is on a full disk, the exception is raised on every rank."""
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def fill_disk(folder):
    """Make rank 2's file lead to a device that is full."""
    os.makedirs(folder, exist_ok=True)
    os.symlink("/dev/full", os.path.join(folder, "__2_0.distcp"))


def train_and_save(rank):
    model = {f"layers.{rank}.weight": torch.randn(256, 256), f"layers.{rank}.bias": torch.zeros(256)}
    for step in range(3):
        print(f"[{rank}] step {step} loss {2.0 - step / 10:.2f}", flush=True)
        dist.barrier()
    dcp.save(model, checkpoint_id="step-3")


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        fill_disk("step-3")
    dist.barrier()
    train_and_save(dist.get_rank())


main()
