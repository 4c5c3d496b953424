# expect-rank: 1
# expect-exit: 1
# expect-cause: KeyError: 'label'
# expect-frame: cleanup_breaks_after_the_error.py:14 in read
"""The cleanup of the failing rank runs a collective that fails too: its exception hides the first one."""

import torch.distributed as dist
from _group import RANK, join, steps

join(timeout_s=2)


def read(sample: dict[str, int]) -> int:
    return sample["label"]


try:
    steps(2)
    if RANK == 1:
        read({"image": 1})
    steps(10**9)
finally:
    dist.barrier()
