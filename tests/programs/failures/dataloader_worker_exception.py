# expect-rank: 1
# expect-exit: 1
# expect-cause: ValueError: sample 5 is corrupt
# expect-frame: dataloader_worker_exception.py:17 in __getitem__
"""A data-loader worker raises; the rank re-raises it with the worker's own traceback in the message."""

import torch.utils.data
from _group import RANK, join, steps


class Samples(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if RANK == 1 and index == 5:
            raise ValueError(f"sample {index} is corrupt")
        return index


if __name__ == "__main__":
    join()
    for _ in torch.utils.data.DataLoader(Samples(), num_workers=1 if RANK == 1 else 0):
        steps(1)
    steps(10**9)
