"""The order of samples, and how far a training has come in it."""

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
    """Deal the batches of an epoch out to all workers, and go on where the training stopped.

    ::

        batches = StatefulBatchSampler(dataset, batch_size=32, seed=0)
        loader = DataLoader(dataset, batch_sampler=batches, num_workers=2)
        checkpoint = Checkpoint("runs/a", model=model, sampler=batches)

    ``Checkpoint.step`` advances it, so that batches which a DataLoader has fetched ahead do not
    count. An iteration gives what is left of the epoch. The order of samples depends on seed and
    epoch alone; a training that goes on with another number of workers sees each sample once, too.
    At the end of an epoch, samples that do not make up a batch of all workers are left out
    (``drop_last``), or the first ones are taken again to fill it up.

    Its length, and so a DataLoader's, is that of an epoch, before and after a resume; while an
    iteration goes on, it is the iteration's, which after a resume may have begun within an epoch:
    the last batch is the one that makes it up. A DataLoader with ``persistent_workers`` keeps an
    iteration, and its length, until the next one begins. Raises ConfigError if there are too few
    samples for one batch, or no process group although there are workers.
    """

    before_first: Callable[[], object] | None = None
    """Called once before the next iteration's first batch, if that is not an epoch's first.
    Checkpoint's."""

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
    ) -> None:
        """``batch_size``: samples a worker and batch."""
        grouped = dist.is_available() and dist.is_initialized()
        if not grouped and (workers := os.environ.get("WORLD_SIZE", "1")) not in {"", "0", "1"}:
            raise ConfigError(
                f"StatefulBatchSampler: WORLD_SIZE is {workers}, and there is no process group "
                "yet, and each worker "
                "would get all samples: call distlaunch.toolkit.init(), or init_process_group() of "
                "torch, before"
            )
        self._rank, self._workers = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        self._count, self._batch = len(dataset), _whole("batch_size", batch_size)
        self._shuffle, self._seed, self._drop_last = shuffle, _whole("seed", seed), drop_last
        if not -(1 << 63) <= self._seed < 1 << 64:
            raise ToolkitError(
                f"StatefulBatchSampler: seed is {self._seed}",
                hint="it takes a whole number of 64 bits, as torch does",
            )
        self._iteration: ref[Iterator[list[int]]] | None = None
        """The one that has begun last. It is over when nobody has it any more: a DataLoader takes
        its end ahead."""
        self._length = 0
        """Of that one."""
        self.epoch = 0
        self.position = 0
        """How many samples of this epoch all workers together have taken."""
        if self._batch < 1 or not self._count or (drop_last and self._count < self._all):
            raise ConfigError(
                f"StatefulBatchSampler: {self._count} samples are too few for batches of "
                f"{self._batch} "
                f"on {self._workers} workers"
            )

    @property
    def _all(self) -> int:
        return self._batch * self._workers

    def _batches(self, samples: int) -> int:
        return samples // self._all if self._drop_last else -(-samples // self._all)

    @property
    def _left(self) -> int:
        return self._batches(self._count - self.position)

    def __len__(self) -> int:
        goes_on = self._iteration is not None and self._iteration() is not None
        return self._length if goes_on else self._batches(self._count)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iteration": None}

    def __iter__(self) -> Iterator[list[int]]:
        iteration = self._iterate()
        self._iteration, self._length = ref(iteration), self._left
        return iteration

    def _iterate(self) -> Iterator[list[int]]:
        seed, self._length = self._seed + self.epoch, self._left
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
            samples = order[number * self._all : (number + 1) * self._all]
            if missing := -len(samples) % self._workers:
                samples = torch.cat([samples, samples[:1].expand(missing)])
            yield samples[self._rank :: self._workers].tolist()

    def advance(self, batches: int = 1) -> None:
        """Count batches that have been trained on; behind the last of an epoch the next one
        begins."""
        self.position += batches * self._all
        if not self._left or self.position >= self._count:
            self.epoch += 1
            self.position = 0

    def state_dict(self) -> dict[str, Any]:
        """Give epoch and position, the same on all workers, and what the order depends on."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self._seed,
            "samples": self._count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there. Raises ConfigError if the data set has another number of samples, or the
        seed is another."""
        if (state["samples"], state["seed"]) != (self._count, self._seed):
            raise ConfigError(
                f"the checkpoint's sampler had {state['samples']} samples and seed "
                f"{state['seed']}; "
                f"here it has {self._count} and seed {self._seed}"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        if not self._left:  # more workers: what is left does not make up a batch of theirs
            self.epoch, self.position = self.epoch + 1, 0


def _whole(name: str, number: Any) -> int:
    """Take numpy's and torch's whole numbers as well."""
    try:
        if not isinstance(number, bool):
            return operator.index(number)
    except TypeError:
        pass
    raise ToolkitError(
        f"StatefulBatchSampler: {name} is {number!r}", hint="it takes a whole number"
    )
