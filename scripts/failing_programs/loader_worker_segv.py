# workers: 2
# expect-rank: 0
# expect-exit: 1
# expect-cause: Segmentation fault
# expect-hint: native | library | extension | num_workers=0
# misleads: /dev/shm
# misleads: out of memory
"""A data-loader worker of rank 0 dies in an image library's C code."""
import ctypes
import os
import time

import torch
from torch.utils.data import DataLoader, Dataset

RANK = int(os.environ["RANK"])


def decode(data):
    return ctypes.string_at(8 if data is None else data, 8)


class Images(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        if RANK == 0 and index == 11:
            decode(None)
        return torch.full((3, 8, 8), float(index))


def main():
    for epoch in range(2):
        for images in DataLoader(Images(), batch_size=4, num_workers=2):
            print(f"[{RANK}] epoch {epoch} mean {images.mean():.2f}", flush=True)
    time.sleep(20)


if __name__ == "__main__":
    main()
