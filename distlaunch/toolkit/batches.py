"""A batch sampler for distributed training that can resume within an epoch."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Sized
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.toolkit_error import ToolkitError


class StatefulBatchSampler(Sampler[list[int]]):
    """Divides the batches of each epoch among all workers. Its position is saved in checkpoints.

    ::

        batches = StatefulBatchSampler(dataset, batch_size=32, seed=0)
        loader = DataLoader(dataset, batch_sampler=batches, num_workers=2)
        checkpoint = Checkpoint("runs/a", model=model, sampler=batches)

    ``Checkpoint.step`` advances the position, so batches that a DataLoader has only prefetched do
    not count. Iterating yields the remaining batches of the epoch. The order depends only on seed
    and epoch, so each sample is used once even if the training resumes with another number of
    workers. If the last samples of an epoch do not fill a batch on all workers, they are dropped
    (``drop_last``). Otherwise the last batch is smaller, and its first sample is repeated until all
    workers have equally many.

    The length is the number of batches of a whole epoch. During an iteration it is the length of
    this iteration, which is shorter after a resume within an epoch. A DataLoader with
    ``persistent_workers`` keeps its iteration, and so this length, until the next one begins.

    Raises ConfigError if the dataset has fewer samples than one batch needs, or if there are
    several workers and no process group.
    """

    before_first: Callable[[], object] | None = None
    """Called once before the next iteration, if the iteration resumes within an epoch. Set by
    ``Checkpoint``."""

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
    ) -> None:
        grouped = dist.is_available() and dist.is_initialized()
        if not grouped and (workers := os.environ.get("WORLD_SIZE", "1")) not in {"", "0", "1"}:
            raise ToolkitError(
                f"StatefulBatchSampler: WORLD_SIZE is {workers}, but there is no process group yet, "
                "so each worker would get all samples",
                hint="call distlaunch.toolkit.init() or torch's init_process_group() first",
            )
        self._rank, self._workers = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        self._count, self._batch = len(dataset), _to_int("batch_size", batch_size)
        self._shuffle, self._seed, self._drop_last = shuffle, _to_int("seed", seed), drop_last
        if not -(1 << 63) <= self._seed < 1 << 64:
            raise ToolkitError(
                f"StatefulBatchSampler: seed is {self._seed}",
                hint="it takes a whole number of 64 bits, as torch does",
            )
        self._iteration: ref[Iterator[list[int]]] | None = None
        """A weak reference, because a DataLoader drops an exhausted iteration."""
        self._length = 0
        """Number of batches of the latest iteration."""
        self.epoch = 0
        self.position = 0
        """Samples of this epoch that all workers together have trained on."""
        if self._batch < 1 or not self._count or (drop_last and self._count < self._global_batch):
            raise ConfigError(
                f"StatefulBatchSampler: {self._count} samples are too few for batches of "
                f"{self._batch} on {self._workers} workers"
            )

    @property
    def _global_batch(self) -> int:
        return self._batch * self._workers

    def _count_batches(self, samples: int) -> int:
        return (
            samples // self._global_batch if self._drop_last else -(-samples // self._global_batch)
        )

    @property
    def _remaining_batches(self) -> int:
        return self._count_batches(self._count - self.position)

    def __len__(self) -> int:
        is_iterating = self._iteration is not None and self._iteration() is not None
        return self._length if is_iterating else self._count_batches(self._count)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iteration": None}

    def __iter__(self) -> Iterator[list[int]]:
        iteration = self._iterate()
        self._iteration, self._length = ref(iteration), self._remaining_batches
        return iteration

    def _iterate(self) -> Iterator[list[int]]:
        seed, self._length = self._seed + self.epoch, self._remaining_batches
        generator = torch.Generator().manual_seed(seed if seed < 1 << 64 else seed - (1 << 64))
        order = (
            torch.randperm(self._count, generator=generator)
            if self._shuffle
            else torch.arange(self._count)
        )
        order = order[self.position :]
        if self.before_first is not None and self.position:
            self.before_first()
        self.before_first = None
        for number in range(self._length):
            samples = order[number * self._global_batch : (number + 1) * self._global_batch]
            if missing := -len(samples) % self._workers:
                samples = torch.cat([samples, samples[:1].expand(missing)])
            yield samples[self._rank :: self._workers].tolist()

    def advance(self, batches: int = 1) -> None:
        """Advance by batches that were trained on. After an epoch's last batch, begin the next
        epoch."""
        self.position += batches * self._global_batch
        if not self._remaining_batches or self.position >= self._count:
            self.epoch += 1
            self.position = 0

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and position, equal on all workers, with seed and number of samples."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self._seed,
            "samples": self._count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at a saved position. Raises ConfigError if the seed or the number of samples
        differs."""
        if (state["samples"], state["seed"]) != (self._count, self._seed):
            raise ConfigError(
                f"the checkpoint's sampler had {state['samples']} samples and seed "
                f"{state['seed']}; here it has {self._count} and seed {self._seed}"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        if not self._remaining_batches:  # with more workers the rest may not fill a batch
            self.epoch, self.position = self.epoch + 1, 0


def _to_int(name: str, number: Any) -> int:
    """Return an integer of Python, numpy or torch as int. Raises ToolkitError for anything else."""
    try:
        if not isinstance(number, bool):
            return operator.index(number)
    except TypeError:
        pass
    raise ToolkitError(
        f"StatefulBatchSampler: {name} is {number!r}", hint="it takes a whole number"
    )
