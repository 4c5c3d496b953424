# expect-rank: 0
# expect-exit: 4
# expect-cause: exit code 4
"""Rank 0, which holds the store, leaves without a word: the others wait on the store."""

import os
import time

import torch.distributed as dist
from _group import RANK, join

join()
if RANK == 0:
    time.sleep(0.5)
    os._exit(4)
store = dist.distributed_c10d._get_default_store()
store.get("a key that nobody sets")
