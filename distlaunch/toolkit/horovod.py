"""Layer toolkit: Horovod: its optimizer averages the gradients; a group of torch's beside it serves all the rest."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from distlaunch.toolkit.errors import ToolkitError
from distlaunch.toolkit.options import WrapOptions

if TYPE_CHECKING:
    from torch import nn


def rendezvous(rank: int, world_size: int) -> Any:
    """Start Horovod, and have rank 0 make a store by which the workers find each other.

    ``MASTER_PORT`` is where Horovod's own store listens, so that this one's port is told by a broadcast.
    """
    hvd = _horovod()
    hvd.init()
    if (hvd.rank(), hvd.size()) != (rank, world_size):
        raise ToolkitError(
            f"RANK {rank} of WORLD_SIZE {world_size} is rank {hvd.rank()} of {hvd.size()} for Horovod",
            hint="have one launcher set both: distlaunch train --backend horovod",
        )
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined] # it is documented there
    own = tcp_store(host, 0, world_size, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = hvd.broadcast(torch.tensor([0 if own is None else own.port]), 0, name="distlaunch.store")
    return own or tcp_store(host, int(port), world_size, is_master=False)


def wrap_horovod(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, options: WrapOptions
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Give all workers rank 0's parameters, buffers and optimizer state, and an optimizer that averages gradients."""
    if optimizer is None:
        raise ToolkitError(
            "Horovod needs the optimizer, which averages the gradients",
            hint="model, optimizer = wrap(model, optimizer)",
        )
    hvd = _horovod()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    _share_state(hvd, optimizer)
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=getattr(hvd.Compression, options.compression)
    )
    # Horovod makes it of the parameter groups alone. They are the same ones still, which a scheduler may hold.
    wrapped.state = optimizer.state
    return model, wrapped


def _share_state(hvd: Any, optimizer: torch.optim.Optimizer) -> None:
    """Give all workers the optimizer state of rank 0, which may be the only one that has loaded some, or has none."""
    state = optimizer.state_dict()["state"]
    parts = {number: sorted(of) for number, of in state.items()}
    if any(each != parts for each in hvd.allgather_object(parts, name="distlaunch.parts")):
        # Where there is none Horovod's own function takes a step to have some, which decays weights.
        whole = _on_cpu(optimizer.state_dict()) if hvd.rank() == 0 else None
        optimizer.load_state_dict(hvd.broadcast_object(whole, root_rank=0, name="distlaunch.state"))
    elif parts:
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def _on_cpu(value: Any) -> Any:
    """Copy all tensors to where every worker has room for them."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(each) for key, each in value.items()}
    return [_on_cpu(each) for each in value] if isinstance(value, list) else value


def _horovod() -> Any:
    try:
        return import_module("horovod.torch")
    except ImportError as exc:
        raise ToolkitError(
            f"--backend horovod: {exc}", hint="HOROVOD_WITH_PYTORCH=1 pip install --no-build-isolation horovod"
        ) from exc
