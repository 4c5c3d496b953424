"""Warn if all workers train on the same batches because the data is not split.

Each worker hashes its first two batches and counts the digest in the store. The one that raises a
count to the number of workers logs the warning. No worker waits.
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
_HASHED_ELEMENTS = 4096
"""How many elements of a tensor are hashed, in addition to its sum."""


class SameBatchesCheck:
    """Forward hook that hashes the first training batches and then removes itself."""

    def __init__(self, model: nn.Module, store: Any, *, world_size: int, attempt: int) -> None:
        self._store, self._world_size, self._attempt = store, world_size, attempt
        self._digest = hashlib.blake2b(digest_size=16)
        self._batches = 0
        self._handle = model.register_forward_pre_hook(self, with_kwargs=True, prepend=True)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hash the batch, if the model is in training."""
        if _is_compiling() or not (model.training and torch.is_grad_enabled()):
            return
        try:
            self._add_batch([*_find_tensors(args), *_find_tensors(kwargs)])
        except Exception:  # noqa: BLE001 - the check must not make a training fail
            self._handle.remove()

    def __deepcopy__(self, _memo: dict[int, Any]) -> Callable[..., None]:
        """Return a hook without effect: only the original model is trained."""
        return _no_hook

    def __reduce__(self) -> str:
        """Pickle as the hook without effect."""
        return "_no_hook"

    def _add_batch(self, tensors: list[torch.Tensor]) -> None:
        if not tensors:
            return
        for tensor in tensors:
            _add_tensor(self._digest, tensor)
        self._batches += 1
        if self._batches < BATCHES:
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


def _no_hook(*_: object) -> None: ...


def _is_compiling() -> bool:
    """Return whether torch.compile is tracing. The hook would cause a graph break there."""
    compiler = getattr(torch, "compiler", None)
    return bool(
        compiler is not None and hasattr(compiler, "is_compiling") and compiler.is_compiling()
    )


def _find_tensors(value: Any) -> Iterator[torch.Tensor]:
    if type(value) is torch.Tensor:  # reading a DTensor needs a collective
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _find_tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _find_tensors(each)


def _add_tensor(digest: Any, tensor: torch.Tensor) -> None:
    digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if not flat.numel():
        return
    values = flat[:: max(1, flat.numel() // _HASHED_ELEMENTS)].to("cpu", torch.float64)
    digest.update(values.numpy().tobytes())
    digest.update(struct.pack("d", float(flat.sum(dtype=torch.float64))))
