"""Two workers that resume at a URL (``s3.py URL``); each prints what came of it, rank 0 first."""

import json
import os
import sys
import tempfile

import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

from distlaunch.core.errors import LaunchError
from distlaunch.toolkit.checkpoint import storage
from distlaunch.toolkit.checkpoint.checkpoint import Checkpoint


def work(rank: int, url: str, store_file: str, out: str) -> None:
    storage._RETRIES_S = (0.0,)
    dist.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=2)
    checkpoint = Checkpoint(url, model=nn.Linear(2, 1))
    try:
        reported = {"kind": "resumed", "text": str(checkpoint.resume())}
    except LaunchError as error:
        reported = {"kind": type(error).__name__, "text": error.message}
    with open(f"{out}/{rank}", "w", encoding="utf-8") as file:
        file.write(json.dumps(reported) + "\n")
    checkpoint.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = (sys.argv[1], os.path.join(folder, "meeting"), folder)
        # Forked, so that torch is imported once.
        multiprocessing.start_processes(work, arguments, nprocs=2, start_method="fork")
        for rank in range(2):
            with open(f"{folder}/{rank}", encoding="utf-8") as file:
                print(file.read(), end="")
