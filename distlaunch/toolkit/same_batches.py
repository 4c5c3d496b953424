"""Warn if all workers train on the same batches, because nobody splits the data between them.

Each worker counts a digest of its first two batches in the store by which the workers have found
each other. The one that brings the count of a digest to the number of workers warns. Nobody waits
for anybody.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

log = logging.getLogger("distlaunch.toolkit")

BATCHES = 2
_ELEMENTS = 4096
"""So many elements of a tensor are compared, and its sum."""


class FirstBatches:
    """A hook of the model that takes the digests of its first batches, and then removes itself."""

    def __init__(self, model: nn.Module, store: Any, *, world_size: int, attempt: int) -> None:
        self._store, self._world_size, self._attempt = store, world_size, attempt
        self._digest = hashlib.blake2b(digest_size=16)
        self._taken = 0
        self._handle = model.register_forward_pre_hook(self, with_kwargs=True, prepend=True)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the batch, if the model is being trained."""
        if _is_compiling() or not (model.training and torch.is_grad_enabled()):
            return
        try:
            self._take([*_tensors(args), *_tensors(kwargs)])
        except Exception:  # noqa: BLE001 - no training fails for a warning
            self._handle.remove()

    def __deepcopy__(self, _memo: dict[int, Any]) -> Callable[..., None]:
        """Have a copy of the model do without: it is not the one that is trained."""
        return _no_hook

    def __reduce__(self) -> str:
        """Do the same for one that is pickled."""
        return "_no_hook"

    def _take(self, tensors: list[torch.Tensor]) -> None:
        if not tensors:
            return
        for tensor in tensors:
            _add(self._digest, tensor)
        self._taken += 1
        if self._taken < BATCHES:
            return
        self._handle.remove()
        key = f"first batches/{self._attempt}/{self._digest.hexdigest()}"
        if self._store.add(key, 1) == self._world_size:
            log.warning(
                "distlaunch: warning: all %d workers train on the same batches: nobody splits the "
                "data. Give the "
                "DataLoader batch_sampler=distlaunch.toolkit.StatefulBatchSampler(dataset, "
                "batch_size=...), or "
                "sampler=torch.utils.data.distributed.DistributedSampler(dataset)",
                self._world_size,
            )


def _no_hook(*_: object) -> None:
    """Do nothing before a forward pass."""


def _is_compiling() -> bool:
    """Return whether torch.compile reads this function: then the hook does nothing, and breaks no
    graph."""
    compiler = getattr(torch, "compiler", None)
    return bool(
        compiler is not None and hasattr(compiler, "is_compiling") and compiler.is_compiling()
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if type(value) is torch.Tensor:  # the values of a DTensor would take a collective
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


def _add(digest: Any, tensor: torch.Tensor) -> None:
    digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if not flat.numel():
        return
    values = flat[:: max(1, flat.numel() // _ELEMENTS)].to("cpu", torch.float64)
    digest.update(values.numpy().tobytes())
    digest.update(struct.pack("d", float(flat.sum(dtype=torch.float64))))
