"""Layer toolkit: what all workers of a job settle together for their checkpoints, over groups of their own."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from distlaunch.core.errors import ConfigError

T = TypeVar("T")

END_S = 10
"""How long workers wait for each other when they end."""


class Group:
    """All workers; the group is gloo's, on CPUs, whatever the training uses.

    Two of them let a thread write a checkpoint while the training goes on: collectives of one group keep an order.
    """

    def __init__(self, handle: dist.ProcessGroup | None) -> None:
        self.handle = handle
        """None: one worker, which has nobody to ask."""
        self.rank = 0 if handle is None else dist.get_rank(handle)
        self.size = 1 if handle is None else dist.get_world_size(handle)

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """Give the largest of all workers' numbers, place by place."""
        if self.handle is None:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.handle)
        return [int(number) for number in tensor.tolist()]

    def all(self, value: T) -> list[T]:
        """Give each worker's value, by rank."""
        if self.handle is None:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self.handle)
        return cast("list[T]", values)

    def first(self, value: T) -> T:
        """Give rank 0's value to all."""
        if self.handle is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.handle)
        return values[0]

    def end(self) -> None:
        """Wait for each other, at most ``END_S``, and give the group up: its threads can abort a Python that ends."""
        if self.handle is not None:
            with suppress(RuntimeError, ValueError):  # another worker, or the whole process group, is gone
                dist.monitored_barrier(self.handle, timeout=timedelta(seconds=END_S))
                dist.destroy_process_group(self.handle)
        self.handle = None


def new_groups() -> tuple[Group, Group]:
    """Form the two groups; every worker has to call this. Raises ConfigError if the job has no group of its own yet."""
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")  # it is meant so
            return Group(None), Group(None)
        raise ConfigError(
            f"Checkpoint: WORLD_SIZE is {os.environ['WORLD_SIZE']}, and there is no process group yet: "
            "call distlaunch.toolkit.init(), or torch.distributed.init_process_group(), before"
        )
    return Group(dist.new_group(backend="gloo")), Group(dist.new_group(backend="gloo"))


def end_process_group() -> None:
    """End torch's groups together. All workers are about to end: for a bounded time each waits for the others."""
    if dist.is_initialized():
        with suppress(RuntimeError, ValueError):
            if dist.get_backend() == "gloo":
                dist.monitored_barrier(timeout=timedelta(seconds=END_S))
            dist.destroy_process_group()
