"""``wrap``: distribute a model with DDP, FSDP2 or Horovod, depending on the launcher's backend."""

from __future__ import annotations

from typing import TypeVar, overload

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distlaunch.toolkit.context import Context, current, group_store
from distlaunch.toolkit.optimizer_state import load_optimizer_state
from distlaunch.toolkit.same_batches import SameBatchesCheck
from distlaunch.toolkit.toolkit_error import ToolkitError
from distlaunch.toolkit.wrap_options import refuse_other_wrappers, wrap_options

_has_check = False
"""Only the first model gets the check for equal batches."""
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


@overload
def wrap(model: nn.Module, optimizer: None = None, **options: object) -> nn.Module: ...
@overload
def wrap(
    model: nn.Module, optimizer: Optimizer, **options: object
) -> tuple[nn.Module, Optimizer]: ...
def wrap(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: object
) -> nn.Module | tuple[nn.Module, torch.optim.Optimizer]:
    """Move a model to the device, and average its gradients over all workers. Return the wrapped
    model, with the optimizer if it is given.

    All workers start with the parameters and buffers of rank 0. Pass the optimizer, too, or create
    it from the wrapped model's parameters. FSDP2 replaces the parameters, and ``wrap`` makes a
    passed optimizer train the new ones; it remains the same object and keeps its state. With
    Horovod, all workers get the optimizer state of rank 0.

    The script must split the data: ``StatefulBatchSampler`` or torch's ``DistributedSampler`` give
    each worker its share. If all workers train on the same first two batches, a warning is logged
    once.

    ``options`` are the launcher's ``-o`` options with underscores (``wrap_classes="Block"``).
    Options of another strategy have no effect, and options of the launcher take precedence.

    Raises ToolkitError if ``init`` was not called, for unknown options, a model without trainable
    parameters or on the meta device, an optimizer of another model, and anything that the strategy
    or the device does not support.
    """
    context = current("wrap")
    refuse_other_wrappers()
    chosen = wrap_options(options)
    _check_arguments(model, optimizer)
    if context.strategy == "fsdp":
        from distlaunch.toolkit.fsdp import shard

        # It moves the model part by part, because the whole may not fit on the device.
        shard(model, optimizer, chosen, context)
    elif context.strategy == "horovod":
        from distlaunch.toolkit.horovod import average_by_horovod

        _move_to_device(model, optimizer, context.device)
        average_by_horovod(model, optimizer, chosen)
    else:
        _move_to_device(model, optimizer, context.device)
        model = DistributedDataParallel(
            model,
            device_ids=None if context.device.type == "cpu" else [context.device],
            bucket_cap_mb=chosen.bucket_mb,
            find_unused_parameters=chosen.find_unused_parameters,
            static_graph=chosen.static_graph,
        )
    _install_data_check(model, context)
    return model if optimizer is None else (model, optimizer)


def _install_data_check(model: nn.Module, context: Context) -> None:
    global _has_check  # noqa: PLW0603 - once a process
    if context.world_size > 1 and not _has_check:
        _has_check = True
        SameBatchesCheck(
            model, group_store(), world_size=context.world_size, attempt=context.attempt
        )


def _check_arguments(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    if isinstance(model, DistributedDataParallel) or "FSDPModule" in {
        base.__name__ for base in type(model).__mro__
    }:
        raise ToolkitError(f"{type(model).__name__} is already wrapped")
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        which = "parameters that require a gradient" if parameters else "parameters"
        raise ToolkitError(
            f"{type(model).__name__} has no {which}",
            hint="pass the whole model, and only one that is trained",
        )
    if any(tensor.is_meta for tensor in [*parameters, *model.buffers()]):
        raise ToolkitError(
            f"{type(model).__name__} is on the meta device, so it has no values to start with",
            hint="make the model on the CPU; wrap() moves it",
        )
    if optimizer is not None:
        trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if trained.isdisjoint(map(id, parameters)):
            raise ToolkitError(
                f"the {type(optimizer).__name__} trains no parameter of {type(model).__name__}",
                hint="make the optimizer from model.parameters(), before or after wrap()",
            )


def _move_to_device(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device
) -> None:
    model.to(device)
    if optimizer is not None and optimizer.state and device.type != "cpu":
        load_optimizer_state(optimizer, optimizer.state_dict())
