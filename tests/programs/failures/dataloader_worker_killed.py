# expect-rank: 2
# expect-exit: 1
# expect-cause: DataLoader worker
# expect-hint: host memory
"""A data-loader worker is killed, as by the kernel when memory or /dev/shm is full, while the training runs."""

import multiprocessing
import multiprocessing.synchronize
import os
import signal

import torch.utils.data
from _group import RANK, join, steps

TRAINED = 4
DEADLY = 5
"""The loader's worker reads it ahead while the main process trains with the sample before it."""


class Samples(torch.utils.data.Dataset[int]):
    def __init__(self, training: multiprocessing.synchronize.Semaphore) -> None:
        self.training = training

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if RANK == 2 and index == DEADLY:
            self.training.acquire()
            os.kill(os.getpid(), signal.SIGKILL)
        return index


if __name__ == "__main__":
    join()
    training = multiprocessing.Semaphore(0)
    for index in torch.utils.data.DataLoader(Samples(training), num_workers=1 if RANK == 2 else 0):
        steps(1)
        if index == TRAINED:
            training.release()
            steps(10**9)
