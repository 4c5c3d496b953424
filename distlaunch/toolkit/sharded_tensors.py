"""Work with DTensors, of which each worker has a shard.

``is_sharded`` does not import DTensor, because torch 2.2 to 2.4 have it in another module.
``sharded_like`` imports ``torch.distributed.tensor`` if ``like`` is a DTensor.
"""

from __future__ import annotations

from typing import Any

import torch


def is_sharded(value: object) -> bool:
    """Return whether a value is a DTensor."""
    return isinstance(value, torch.Tensor) and hasattr(type(value), "full_tensor")


def sharded_like(value: Any, like: torch.Tensor) -> Any:
    """Return this worker's shard of ``value`` if ``like`` is sharded and has the same shape, else
    ``value``."""
    whole = isinstance(value, torch.Tensor) and not is_sharded(value)
    if not (whole and is_sharded(like) and value.shape == like.shape and value.dim()):
        return value
    from torch.distributed.tensor import distribute_tensor

    template: Any = like
    own = distribute_tensor(value, template.device_mesh, template.placements, src_data_rank=None)
    kept: Any = torch.empty_like(template, dtype=value.dtype, requires_grad=False)
    kept.to_local().copy_(own.to_local())
    return kept
