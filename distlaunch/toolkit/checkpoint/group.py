"""What all workers of a job settle together for their checkpoints, over groups of their own."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.checkpoint.storage import CheckpointError, describe, some
from distlaunch.toolkit.wait_at_end import END_S, meet

log = logging.getLogger("distlaunch.checkpoint")
T = TypeVar("T")
Call = tuple[str, int]
"""The method of Checkpoint that a worker has called, and a step: ``("save", 5)``; -1 is none."""
_METHODS = "", "step", "save", "resume", "close"


class LostError(RuntimeError):
    """Gloo has failed: another worker has ended or cannot be reached, or does not answer in time."""


class Group:
    """All workers; the group is gloo's, on CPUs, whatever the training uses.

    Two of them let a thread write a checkpoint while the training goes on: collectives of one group keep an order.
    """

    warn_after_s = 60.0
    """How long a call waits for those of the others before that is logged."""

    def __init__(self, handle: dist.ProcessGroup | None) -> None:
        self.handle = handle
        """None: one worker, which has nobody to ask."""
        self.rank = 0 if handle is None else dist.get_rank(handle)
        self.size = 1 if handle is None else dist.get_world_size(handle)
        self._has_answer = False
        """Whether another worker has closed, and this one knows it."""
        self.closing: dist.Work | None = None
        """The collective that ``close`` has begun."""

    def compare(self, call: Call, numbers: Sequence[int]) -> list[int]:
        """Return the largest of all workers' numbers, place by place, if all of them have made the same call.

        It is the first collective of each call, and the same one for all of them, so that different calls meet here.
        ``numbers`` are four. Raises ConfigError on all workers if they have made different calls.
        """
        if self.handle is None:
            return list(numbers)
        tensor = self._request(call, numbers)
        with _lost(), self._warning_of_a_wait(call):
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.handle)
        found = [int(number) for number in tensor.tolist()]
        calls = [(_METHODS[found[2 * n]], found[2 * n + 1] - 1) for n in range(self.size)]
        self._has_answer = any(method == "close" for method, _ in calls)
        if different := _different(calls):
            raise ConfigError(f"Checkpoint: {different}; all have to make the same ones")
        return found[2 * self.size :]

    @contextmanager
    def _warning_of_a_wait(self, call: Call) -> Iterator[None]:
        """Log a warning if the others do not make their calls: they may be in a collective of the training for ever."""
        method, step = call
        text = (
            f"distlaunch: Checkpoint: rank {self.rank} has called {method}({step if step >= 0 else ''}) and has waited "
            f"{self.warn_after_s:g} s for the other workers: each of them has to make this call, not rank 0 alone"
        )
        timer = threading.Timer(self.warn_after_s, log.warning, (text,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def close(self) -> None:
        """Answer the first collective of a worker that makes another call after this one has closed. Returns at once.

        A worker whose call has met another's ``close`` does not do so: its own would meet nothing.
        """
        if self.handle is not None and not self._has_answer:
            tensor = self._request(("close", -1), (0, 0, 0, 0))
            with suppress(RuntimeError):
                self.closing = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.handle, async_op=True)

    def _request(self, call: Call, numbers: Sequence[int]) -> torch.Tensor:
        """Return two numbers for each worker, of which only this one's are set, and then ``numbers``."""
        tensor = torch.zeros(2 * self.size + len(numbers), dtype=torch.int64)
        method, step = call
        mine = [_METHODS.index(method), step + 1]
        tensor[2 * self.rank : 2 * self.rank + 2] = torch.tensor(mine)
        tensor[2 * self.size :] = torch.tensor(numbers)
        return tensor

    def all(self, value: T) -> list[T]:
        """Give each worker's value, by rank."""
        if self.handle is None:
            return [value]
        values: list[T | None] = [None] * self.size
        with _lost():
            dist.all_gather_object(values, value, group=self.handle)
        return cast("list[T]", values)

    def first(self, value: T) -> T:
        """Give rank 0's value to all."""
        if self.handle is None:
            return value
        values = [value]
        with _lost():
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
            why = cause.message if isinstance(cause, CheckpointError) else text_of(cause)
            problem = CheckpointError, f"{where}: rank {rank}: {why}"
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


@contextmanager
def _lost() -> Iterator[None]:
    """Raise LostError for gloo's error."""
    try:
        yield
    except RuntimeError as error:
        raise LostError(str(error)[:200]) from error


def _different(calls: Sequence[Call]) -> str:
    """Describe the calls of all workers if they are not the same: ``rank 0: save(5); rank 1: step(9)``."""
    ranks: dict[str, list[str]] = {}
    for rank, (method, step) in enumerate(calls):
        ranks.setdefault(f"{method}({step if step >= 0 else ''})", []).append(str(rank))
    if len(ranks) == 1:
        return ""
    told = [f"{'rank' if len(those) == 1 else 'ranks'} {some(those)}: {call}" for call, those in ranks.items()]
    return "the workers have made different calls: " + "; ".join(told)


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
            for group in groups:
                if group.closing is not None:
                    group.closing.wait(timedelta(seconds=END_S))
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
