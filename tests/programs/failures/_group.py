"""Common parts of the failing programs: rank, a gloo group with a short timeout, one step of work."""

from __future__ import annotations

import os
import time
from datetime import timedelta

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


def join(timeout_s: float = 8.0) -> None:
    """Join the gloo group of all ranks (env:// rendezvous)."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))


def steps(count: int) -> None:
    """Run ``count`` all-reduces: an endless training is ``steps(10**9)``."""
    import torch
    import torch.distributed as dist

    for _ in range(count):
        dist.all_reduce(torch.ones(8))


def sleep_until_stopped() -> None:
    """Work on without noticing anything, as a rank in a long computation does."""
    time.sleep(40)
