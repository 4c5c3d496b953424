# expect-rank: 2
# expect-exit: 1
# expect-cause: did not set the key vocab of the store that ranks 0-1,3 waited for: TCPStore timed out after 3 s
# expect-frame: key_is_never_set.py:18 in build_vocabulary
# expect-hint: the key vocab
"""Rank 2 builds the vocabulary longer than the others wait for its key in the store."""

import time
from datetime import timedelta

import torch.distributed as dist
from _group import RANK, join


def build_vocabulary() -> None:
    store = dist.distributed_c10d._get_default_store()
    if RANK == 2:
        time.sleep(40)
        store.set("vocab", "words")
    store.wait(["vocab"], timedelta(seconds=3))


join()
build_vocabulary()
