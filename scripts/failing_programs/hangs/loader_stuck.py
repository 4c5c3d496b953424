# workers: 2
# hang-timeout: 12
# expect-rank: 1
# expect-cause: read_frame | next_batch
# misleads: same collectives
"""A data-loader worker of rank 1 reads from a named pipe that nobody writes; the main process waits for its batch."""
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


def read_frame(index):
    if os.environ["RANK"] == "1" and index == 5:
        os.mkfifo("camera-1")
        with open("camera-1", "rb") as pipe:
            return pipe.read()
    return b"frame"


class Frames(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return len(read_frame(index))


def next_batch(batches):
    return next(batches)


def main():
    dist.init_process_group("gloo")
    batches = iter(DataLoader(Frames(), batch_size=2, num_workers=1))
    for step in range(6):
        batch = next_batch(batches)
        dist.all_reduce(torch.ones(4))
        print(f"[{dist.get_rank()}] step {step} {batch.tolist()}", flush=True)


if __name__ == "__main__":
    main()
