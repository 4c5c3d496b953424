# expect-rank: 2
# expect-exit: 1
# expect-cause: DataLoader worker
# expect-hint: /dev/shm
"""A data-loader worker is killed, as by the kernel when memory or /dev/shm is full."""

import os
import signal

import torch.utils.data
from _group import RANK, join, steps


class Samples(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if RANK == 2 and index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


if __name__ == "__main__":
    join()
    for _ in torch.utils.data.DataLoader(Samples(), num_workers=1 if RANK == 2 else 0):
        steps(1)
    steps(10**9)
