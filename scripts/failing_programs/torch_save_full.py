# workers: 3
# expect-rank: 0
# expect-exit: 1
# expect-cause: PytorchStreamWriter | unexpected pos | file write failed | No space left
# expect-frame: save_checkpoint
# expect-hint: disk | space
# misleads: Connection closed by peer
"""Rank 0 writes the checkpoint onto a full disk; the others wait at the barrier after it."""
import os

import torch
import torch.distributed as dist


def save_checkpoint(model, path):
    if dist.get_rank() == 0:
        os.symlink("/dev/full", path)
        torch.save({"model": model.state_dict(), "epoch": 7}, path)
    dist.barrier()


def main():
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
    for step in range(2):
        loss = torch.ones(1)
        dist.all_reduce(loss)
    print(f"rank {dist.get_rank()}: epoch 7 done, saving", flush=True)
    save_checkpoint(model, "epoch-7.pt")


main()
