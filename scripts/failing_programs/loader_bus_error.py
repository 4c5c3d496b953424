# workers: 2
# expect-rank: 1
# expect-exit: 1
# expect-cause: Bus error | bus error
# expect-hint: /dev/shm | shm
"""The shared memory of a container is too small for the batches of rank 1's data-loader workers."""
import os
import signal
import time

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

RANK = int(os.environ["RANK"])


class Frames(IterableDataset):
    def __iter__(self):
        for index in range(12):
            if RANK == 1 and index == 6 and get_worker_info().id == 1:
                os.kill(os.getpid(), signal.SIGBUS)  # as a write beyond a full tmpfs ends
            yield torch.zeros(64, 64)


def main():
    loader = DataLoader(Frames(), batch_size=2, num_workers=2, persistent_workers=True)
    for step, batch in enumerate(loader):
        print(f"[{RANK}] step {step} {tuple(batch.shape)}", flush=True)
    time.sleep(20)


if __name__ == "__main__":
    main()
