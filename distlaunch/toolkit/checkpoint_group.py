"""Layer toolkit: what all workers of a job settle together for their checkpoints, over groups of their own."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.checkpoint_store import CheckpointError, describe
from distlaunch.toolkit.meeting import meet

T = TypeVar("T")


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

    def agree(self, where: str, work: Callable[[], T]) -> T:
        """Have each worker do something that may fail on one of them alone; then it fails on all.

        Raises ConfigError where one of them has, and CheckpointError for anything else.
        """
        problem: tuple[type[ConfigError | CheckpointError], str] | None = None
        result: T | None = None
        try:
            result = work()
        except CheckpointException as failure:  # torch's, of all workers, and no Exception
            rank, (cause, _) = min(failure.failures.items())
            problem = CheckpointError, f"{where}: rank {rank}: {text_of(cause)}"
        except ConfigError as failure:
            problem = ConfigError, f"{where} {failure.message}"
        except CheckpointError as failure:
            problem = CheckpointError, f"{where}: rank {self.rank}: {failure.message}"
        except Exception as failure:  # noqa: BLE001 - the others wait for an answer
            problem = CheckpointError, f"{where}: rank {self.rank}: {text_of(failure)}"
        problems = [problem] if self.handle is None else self.all(problem)
        if found := problem or next((each for each in problems if each is not None), None):
            raise found[0](found[1])
        return cast("T", result)


def text_of(error: BaseException) -> str:
    """Describe an error; torch keeps only the text of many."""
    return str(error) if isinstance(error, OSError) and str(error) else describe(error)


def end_groups(*groups: Group) -> None:
    """Give groups up when all workers have come so far: their threads can abort a Python that ends.

    Where some do not come, they stay: ending a group waits for what is under way in it.
    """
    handles = [group.handle for group in groups if group.handle is not None]
    for group in groups:
        group.handle = None
    if handles and meet("checkpoint"):
        with suppress(RuntimeError, ValueError):  # the whole process group is gone
            for handle in handles:
                dist.destroy_process_group(handle)


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
