"""What a worker adds to a checkpoint: of what it has for itself only what differs from rank 0's."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.nn.parallel import DistributedDataParallel

from distlaunch.toolkit.checkpoint.random_state import random_states
from distlaunch.toolkit.sharded_tensors import is_sharded

Digests = dict[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a worker has at a save."""

    model: dict[str, Any]
    optimizer: dict[str, Any] | None
    classes: list[str]
    """Of each parameter group's optimizer."""
    tied: list[list[str]]
    """The names of parameters that are one."""
    parts: dict[str, tuple[Any, dict[str, torch.Tensor]]]
    """Each without its sharded tensors, and these."""
    own: dict[str, Any]
    """Of the model, what may differ between workers."""
    digests: Digests
    """Of that."""
    for_all: bool
    """Whether rank 0's model is everyone's, as DDP has it."""

    def state(self, rank: int, rank_0s: Digests) -> dict[str, Any]:
        """Give what this worker adds to the checkpoint; of what is its own only what differs from rank 0's."""
        own: dict[str, Any] = {
            "random": random_states(),
            "parts": {name: unsharded for name, (unsharded, _) in self.parts.items()},
            "model": differing(self.own, self.digests, rank_0s) if rank else {},
        }
        stream = io.BytesIO()
        torch.save(own, stream)
        state: dict[str, Any] = {f"worker-{rank}": torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)}
        if sharded := {name: tensors for name, (_, tensors) in self.parts.items() if tensors}:
            state["parts"] = sharded
        if rank == 0:
            state["tied"] = self.tied
        if rank == 0 and self.classes:
            state["classes"] = self.classes
        if rank == 0 or not self.for_all:
            state["model"] = self.model
            if self.optimizer is not None:
                state["optimizer"] = self.optimizer
        return state


def unshared(model: nn.Module, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return what may differ between workers: extra states, buffers that DDP does not broadcast, ignored parameters."""
    ignored = getattr(model, "parameters_to_ignore", ()) if isinstance(model, DistributedDataParallel) else ()
    shared = [
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad or name.removeprefix("module.") not in ignored
    ]
    if isinstance(model, DistributedDataParallel) and model.broadcast_buffers:
        buffers = model.module.named_buffers(remove_duplicate=False)
        shared += [f"module.{name}" for name, _ in buffers if name not in model.parameters_to_ignore]
    of_all = canonical(model, shared)
    return {name: value for name, value in entries.items() if name not in of_all}


def canonical(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Return the names of parameters and buffers that wrappers, as DDP, do not change."""
    return {name for each in names for name in _get_fqns(model, each)}


def digests(entries: Mapping[str, Any]) -> Digests:
    """Digest each of them, so that another worker can tell whether it has the same, on whatever device."""
    return {name: _digest(value) for name, value in entries.items()}


def differing(entries: Mapping[str, Any], mine: Digests, theirs: Digests) -> dict[str, Any]:
    """Copy those whose digests differ: of a view, all of its storage would be saved."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in entries.items()
        if mine[name] != theirs.get(name)
    }


def _digest(value: Any) -> bytes:
    """Take a tensor's type, shape and numbers; of anything else its pickle: that may differ where nothing else does."""
    value = value.to_local() if is_sharded(value) else value
    hashed = blake2b(digest_size=16)
    if type(value) is torch.Tensor and value.layout == torch.strided and not value.is_quantized:
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        hashed.update(f"{value.dtype} {list(value.shape)} ".encode())
        hashed.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    else:
        hashed.update(pickle.dumps(value))
    return hashed.digest()
