# workers: 2
# expect-rank: all
# expect-exit: 1
# expect-cause: <lambda>
# expect-frame: main
# expect-hint: lambda | module level | spawn | pickl
# misleads: /dev/shm
"""The data loader's processes are spawned and its collate function is a lambda inside a function."""
import os
import time

import torch
from torch.utils.data import DataLoader, TensorDataset


def main():
    pad = 8
    data = TensorDataset(torch.arange(32))
    open(f"up-{os.environ['RANK']}", "w").close()
    while len([name for name in os.listdir(".") if name.startswith("up-")]) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
    loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="spawn", collate_fn=lambda rows: (len(rows), pad))
    for batch in loader:
        print(batch)


if __name__ == "__main__":
    main()
