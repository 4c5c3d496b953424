"""Average gradients with Horovod, and copy rank 0's state with it at the start.

The script's own collectives use a torch process group. ``start_horovod`` returns the store for it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from distlaunch.toolkit.optimizer_state import load_optimizer_state
from distlaunch.toolkit.toolkit_error import ToolkitError
from distlaunch.toolkit.wrap_options import WrapOptions

if TYPE_CHECKING:
    from torch import nn

_model_numbers = count(1)
"""Horovod matches operations by name, so each model needs different names."""
_hooks: Any = WeakTensorKeyDictionary()
"""The averaging hook of each parameter."""


def start_horovod(rank: int, world_size: int) -> Any:
    """Initialize Horovod. Return a store for torch's process group, served by rank 0.

    Horovod's own store has ``MASTER_PORT``; this one uses a free port, which rank 0 broadcasts.
    Raises ToolkitError if rank or size are others for Horovod.
    """
    hvd = _import_horovod()
    hvd.init()
    if (hvd.rank(), hvd.size()) != (rank, world_size):
        raise ToolkitError(
            f"RANK {rank} of WORLD_SIZE {world_size} is rank {hvd.rank()} of {hvd.size()} for "
            "Horovod",
            hint="start both with one launcher: distlaunch train --backend horovod",
        )
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined] # it is documented there
    own = (
        tcp_store(host, 0, world_size, is_master=True, wait_for_workers=False)
        if rank == 0
        else None
    )
    port = hvd.broadcast(torch.tensor([0 if own is None else own.port]), 0, name="distlaunch.store")
    return own or tcp_store(host, int(port), world_size, is_master=False)


def average_by_horovod(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, options: WrapOptions
) -> None:
    """Copy rank 0's parameters, buffers and optimizer state to all workers; average gradients."""
    hvd = _import_horovod()
    name = f"distlaunch.{next(_model_numbers)}"
    _broadcast_tensors(
        hvd,
        {f"{name}.{of}": each for of, each in [*model.named_parameters(), *model.named_buffers()]},
    )
    if optimizer is not None:
        _broadcast_optimizer_state(hvd, optimizer, name)
    if hvd.size() > 1:
        _GradientAveraging(hvd, name, model, options.compression)


class _GradientAveraging:
    """Averages a model's gradients during backward.

    Horovod's own optimizer waits in its ``step``: too late for code that clips, scales or
    accumulates gradients. Averaging an averaged gradient again changes nothing, so gradients may be
    accumulated. Copies are averaged, so their memory doubles until backward returns. A parameter
    may be used inside and outside a checkpointed module; it then gets more gradient while its first
    average is pending.
    """

    def __init__(self, hvd: Any, name: str, model: nn.Module, compression: str) -> None:
        self._hvd, self._name, self._compression = hvd, name, compression
        trained = {
            of: each for of, each in model.named_parameters() if each.requires_grad and each.numel()
        }
        self._names = [f"{name}.{of}" for of in trained]
        # Weak, because each parameter's hook refers to this object in a way that the garbage
        # collector cannot see.
        self._parameters = [weakref.ref(each) for each in trained.values()]
        self._pending: dict[int, tuple[Any, torch.Tensor]] = {}
        self._sparse: set[int] = set()
        for number, parameter in enumerate(trained.values()):
            if parameter in _hooks:  # wrapped before: two hooks would average one gradient at once
                _hooks[parameter].remove()
            _hooks[parameter] = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._on_gradient, number)
            )

    def _on_gradient(self, number: int, parameter: torch.Tensor) -> None:
        # Queued for each parameter, because an earlier backward pass may have failed before its
        # callback ran. The first call waits for all averages.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish_averages)  # noqa: SLF001 - as DDP and FSDP do
        if parameter.grad is not None and parameter.grad.is_sparse:
            self._sparse.add(number)
        else:
            self._send_gradient(number)

    @torch.no_grad()
    def _finish_averages(self) -> None:
        """Average gradients that only other workers have computed, and wait for all."""
        if not self._pending and not self._sparse:
            return
        kinds = torch.zeros(2, len(self._parameters))
        kinds[0, list(self._pending)] = kinds[1, list(self._sparse)] = 1
        # Horovod fuses this with the last gradients.
        self._hvd.allreduce_(kinds, name=self._name, op=self._hvd.Average)
        if kinds[0].min() < 1 - 0.5 / self._hvd.size():
            for number, (dense, sparse) in enumerate(kinds.t().tolist()):
                if dense and number not in self._pending:
                    self._send_gradient(number)
                elif sparse and not dense:
                    self._send_sparse(number)
        self._sparse.clear()
        for number in list(self._pending):
            averaged, gradient = self._wait_for_average(number)
            gradient.copy_(averaged)

    @torch.no_grad()
    def _send_gradient(self, number: int) -> None:
        if number in self._pending:
            # A failed or an enclosing backward pass has sent it. Its result is outdated, because
            # the gradient has been added to.
            self._wait_for_average(number)
        parameter: Any = self._parameters[number]()
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        real = (
            torch.view_as_real(parameter.grad)
            if parameter.grad.is_complex()
            else parameter.grad.detach()
        )
        sent = real.to(
            self._transfer_dtype(real.dtype), copy=True, memory_format=torch.contiguous_format
        )
        handle = self._hvd.allreduce_async_(sent, name=self._names[number], op=self._hvd.Average)
        self._pending[number] = handle, real

    def _send_sparse(self, number: int) -> None:
        parameter: Any = self._parameters[number]()
        if parameter.grad is None:
            nothing = torch.empty(
                0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device
            )
            where = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
            parameter.grad = torch.sparse_coo_tensor(where, nothing, parameter.shape)
        sent = parameter.grad.coalesce().to(self._transfer_dtype(parameter.dtype))
        handle = self._hvd.sparse_allreduce_async(
            sent, name=self._names[number], op=self._hvd.Average
        )
        self._pending[number] = handle, parameter.grad

    def _wait_for_average(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the average and the gradient that it replaces."""
        handle, gradient = self._pending.pop(number)
        return (
            handle().coalesce() if gradient.is_sparse else self._hvd.synchronize(handle)
        ), gradient

    def _transfer_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type to average in: Horovod does not support all types."""
        if self._compression == "fp16":
            return torch.float16
        return torch.float32 if dtype == torch.bfloat16 else dtype


def _broadcast_tensors(hvd: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Send rank 0's tensors as bytes, because Horovod does not support all types."""
    broadcasts = []
    for name, tensor in tensors.items():
        if tensor.numel():
            whole = tensor.detach().contiguous()
            sent = whole.view(-1).view(torch.uint8)
            broadcasts.append((tensor.detach(), whole, hvd.broadcast_async_(sent, 0, name)))
    for tensor, whole, handle in broadcasts:
        hvd.synchronize(handle)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)


def _broadcast_optimizer_state(hvd: Any, optimizer: torch.optim.Optimizer, name: str) -> None:
    """Load rank 0's optimizer state on all workers: rank 0 may be the only one that has loaded a
    checkpoint."""
    state = optimizer.state_dict()
    own: list[torch.Tensor] = []
    _map_tensors(state, own.append)
    state = _map_tensors(state, lambda tensor: tensor.to("meta"))
    places = [tensor.device.type for tensor in own]
    state, places = hvd.broadcast_object((state, places), root_rank=0, name=name)
    empty: list[torch.Tensor] = []
    _map_tensors(state, empty.append)
    if [(each.shape, each.dtype) for each in own] != [(each.shape, each.dtype) for each in empty]:
        own = [
            torch.empty_like(each, device=place) for each, place in zip(empty, places, strict=True)
        ]
    _broadcast_tensors(hvd, {f"{name} {number}": tensor for number, tensor in enumerate(own)})
    if hvd.rank():
        values = iter(own)
        load_optimizer_state(optimizer, _map_tensors(state, lambda _: next(values)))


def _map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _map_tensors(each, change) for key, each in value.items()}
    return (
        type(value)(_map_tensors(each, change) for each in value)
        if type(value) in {list, tuple}
        else value
    )


def _import_horovod() -> Any:
    try:
        return import_module("horovod.torch")
    except ImportError as exc:
        raise ToolkitError(
            f"--backend horovod: {exc}",
            hint="HOROVOD_WITH_PYTORCH=1 pip install --no-build-isolation horovod",
        ) from exc
