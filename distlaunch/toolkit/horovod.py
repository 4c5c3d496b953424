"""Horovod: it averages the gradients; a group of torch's beside it serves all the rest."""

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

_turns = count(1)
"""By which the names of one model's tensors differ from another's: Horovod's operations go by
names."""
_hooks: Any = WeakTensorKeyDictionary()
"""What averages the gradient of a parameter."""


def rendezvous(rank: int, world_size: int) -> Any:
    """Start Horovod, and have rank 0 make a store by which the workers find each other.

    ``MASTER_PORT`` is where Horovod's own store listens, so that this one's port is told by a
    broadcast.
    """
    hvd = _horovod()
    hvd.init()
    if (hvd.rank(), hvd.size()) != (rank, world_size):
        raise ToolkitError(
            f"RANK {rank} of WORLD_SIZE {world_size} is rank {hvd.rank()} of {hvd.size()} for "
            "Horovod",
            hint="have one launcher set both: distlaunch train --backend horovod",
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
    """Give all workers rank 0's parameters, buffers and optimizer state, and have backward average
    the gradients."""
    hvd = _horovod()
    name = f"distlaunch.{next(_turns)}"
    _share(
        hvd,
        {f"{name}.{of}": each for of, each in [*model.named_parameters(), *model.named_buffers()]},
    )
    if optimizer is not None:
        _share_state(hvd, optimizer, name)
    if hvd.size() > 1:
        _Averages(hvd, name, model, options.compression)


class _Averages:
    """Averages a model's gradients while backward computes them, so that they are averages when it
    returns, as by DDP.

    Horovod's own optimizer waits for them in its step, and whatever clips, scales, checks or adds
    up gradients before would work on those that are under way. To average again what has been
    averaged changes nothing: a backward pass may add to the gradients of the one before, and those
    within a backward pass (of checkpointed parts) end one by one.

    Copies are averaged, which is as much memory as the gradients have until backward returns: a
    parameter that is used in a checkpointed part and outside it gets the rest of its gradient while
    the first part is under way.
    """

    def __init__(self, hvd: Any, name: str, model: nn.Module, compression: str) -> None:
        self._hvd, self._name, self._compression = hvd, name, compression
        trained = {
            of: each for of, each in model.named_parameters() if each.requires_grad and each.numel()
        }
        self._names = [f"{name}.{of}" for of in trained]
        self._parameters = [
            weakref.ref(each) for each in trained.values()
        ]  # they hold this, which no collector sees
        self._under_way: dict[int, tuple[Any, torch.Tensor]] = {}
        self._sparse: set[int] = set()
        for number, parameter in enumerate(trained.values()):
            if parameter in _hooks:  # wrapped before: two would work on one gradient at a time
                _hooks[parameter].remove()
            _hooks[parameter] = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._computed, number)
            )

    def _computed(self, number: int, parameter: torch.Tensor) -> None:
        # For each parameter, as an earlier backward pass may have failed before its end. The first
        # call does it all.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # noqa: SLF001 - as DDP and FSDP do
        if parameter.grad is not None and parameter.grad.is_sparse:
            self._sparse.add(number)
        else:
            self._send(number)

    @torch.no_grad()
    def _finish(self) -> None:
        """Average what only other workers have computed, too, and wait for everything."""
        if not self._under_way and not self._sparse:
            return
        kinds = torch.zeros(2, len(self._parameters))
        kinds[0, list(self._under_way)] = kinds[1, list(self._sparse)] = 1
        self._hvd.allreduce_(
            kinds, name=self._name, op=self._hvd.Average
        )  # which goes along with the last gradients
        if kinds[0].min() < 1 - 0.5 / self._hvd.size():
            for number, (dense, sparse) in enumerate(kinds.t().tolist()):
                if dense and number not in self._under_way:
                    self._send(number)
                elif sparse and not dense:
                    self._send_sparse(number)
        self._sparse.clear()
        for number in list(self._under_way):
            averaged, gradient = self._wait(number)
            gradient.copy_(averaged)

    @torch.no_grad()
    def _send(self, number: int) -> None:
        if (
            number in self._under_way
        ):  # since a backward pass that has failed, or is around this one
            self._wait(number)  # and no more: the gradient has been added to
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
        sent = real.to(self._carrier(real.dtype), copy=True, memory_format=torch.contiguous_format)
        handle = self._hvd.allreduce_async_(sent, name=self._names[number], op=self._hvd.Average)
        self._under_way[number] = handle, real

    def _send_sparse(self, number: int) -> None:
        parameter: Any = self._parameters[number]()
        if parameter.grad is None:
            nothing = torch.empty(
                0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device
            )
            where = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
            parameter.grad = torch.sparse_coo_tensor(where, nothing, parameter.shape)
        sent = parameter.grad.coalesce().to(self._carrier(parameter.dtype))
        handle = self._hvd.sparse_allreduce_async(
            sent, name=self._names[number], op=self._hvd.Average
        )
        self._under_way[number] = handle, parameter.grad

    def _wait(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for an average; give the gradient that it is of, too."""
        handle, gradient = self._under_way.pop(number)
        return (
            handle().coalesce() if gradient.is_sparse else self._hvd.synchronize(handle)
        ), gradient

    def _carrier(self, dtype: torch.dtype) -> torch.dtype:
        """Name the type to average in: Horovod does not know them all."""
        if self._compression == "fp16":
            return torch.float16
        return torch.float32 if dtype == torch.bfloat16 else dtype


def _share(hvd: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give all workers rank 0's values, as bytes: Horovod does not know all types."""
    under_way = []
    for name, tensor in tensors.items():
        if tensor.numel():
            whole = tensor.detach().contiguous()
            sent = whole.view(-1).view(torch.uint8)
            under_way.append((tensor.detach(), whole, hvd.broadcast_async_(sent, 0, name)))
    for tensor, whole, handle in under_way:
        hvd.synchronize(handle)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)


def _share_state(hvd: Any, optimizer: torch.optim.Optimizer, name: str) -> None:
    """Give all workers the optimizer state of rank 0, which may be the only one that has loaded
    some, or has none."""
    state = optimizer.state_dict()
    own: list[torch.Tensor] = []
    _mapped(state, own.append)
    state = _mapped(state, lambda tensor: tensor.to("meta"))
    places = [tensor.device.type for tensor in own]
    state, places = hvd.broadcast_object((state, places), root_rank=0, name=name)
    empty: list[torch.Tensor] = []
    _mapped(state, empty.append)
    if [(each.shape, each.dtype) for each in own] != [(each.shape, each.dtype) for each in empty]:
        own = [
            torch.empty_like(each, device=place) for each, place in zip(empty, places, strict=True)
        ]
    _share(hvd, {f"{name} {number}": tensor for number, tensor in enumerate(own)})
    if hvd.rank():
        values = iter(own)
        load_optimizer_state(optimizer, _mapped(state, lambda _: next(values)))


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Change all tensors of an optimizer's state, in their order."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _mapped(each, change) for key, each in value.items()}
    return (
        type(value)(_mapped(each, change) for each in value)
        if type(value) in {list, tuple}
        else value
    )


def _horovod() -> Any:
    try:
        return import_module("horovod.torch")
    except ImportError as exc:
        raise ToolkitError(
            f"--backend horovod: {exc}",
            hint="HOROVOD_WITH_PYTORCH=1 pip install --no-build-isolation horovod",
        ) from exc
