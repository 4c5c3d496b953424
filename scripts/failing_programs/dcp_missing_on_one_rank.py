# workers: 3
# expect-rank: 1
# expect-cause: adapter.scale
# expect-hint: key | checkpoint
# misleads: firewall
"""A distributed checkpoint lacks a parameter that only rank 1's stage asks for; DCP raises on all ranks."""
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def state(rank, with_adapter):
    tensors = {f"stage{rank}.weight": torch.ones(8, 8), f"stage{rank}.bias": torch.zeros(8)}
    if with_adapter and rank == 1:
        tensors["adapter.scale"] = torch.ones(1)
    return tensors


def save(rank):
    dcp.save(state(rank, with_adapter=False), checkpoint_id="step-100")


def resume(rank):
    tensors = state(rank, with_adapter=True)
    dcp.load(tensors, checkpoint_id="step-100")
    return tensors


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    save(rank)
    print(f"[{rank}] saved, resuming in {os.path.basename(os.getcwd())}", flush=True)
    resume(rank)


main()
