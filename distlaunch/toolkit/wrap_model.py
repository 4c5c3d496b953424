"""Make a model train with all workers: DDP, FSDP2 or Horovod, as the launcher was told."""

from __future__ import annotations

from typing import TypeVar, overload

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distlaunch.toolkit.context import Context, current, group_store
from distlaunch.toolkit.optimizer_state import load_optimizer_state
from distlaunch.toolkit.same_batches import FirstBatches
from distlaunch.toolkit.toolkit_error import ToolkitError
from distlaunch.toolkit.wrap_options import refuse_other_wrappers, wrap_options

_watches = False
"""The data of a model has been watched."""
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
    """Move a model to the device, and have its gradients averaged over all workers.

    Give the optimizer, too: FSDP2 puts other parameters in the place of the model's, and the
    optimizer is made to train those (the same object, with what it has learnt); Horovod gives all
    workers what rank 0's has learnt. One may as well be made of the wrapped model's parameters. All
    workers start with the parameters and buffers of rank 0.

    The data is the script's to split: ``StatefulBatchSampler``, or torch's ``DistributedSampler``,
    gives each worker its part. A warning says so, once, if all workers train on the same first two
    batches.

    ``options`` are the launcher's ``-o``, with underscores (``wrap_classes="Block"``); those that
    concern another strategy do nothing, and the launcher's own win. Raises ToolkitError before
    ``init``, for options that are not known, a model without parameters to train, one on the meta
    device, an optimizer of another model, and what the strategy or the device cannot have.
    """
    context = current("wrap")
    refuse_other_wrappers()
    chosen = wrap_options(options)
    _check(model, optimizer)
    if context.strategy == "fsdp":
        from distlaunch.toolkit.fsdp import shard

        shard(
            model, optimizer, chosen, context
        )  # moves it part by part: it may be too large to be on a device whole
    elif context.strategy == "horovod":
        from distlaunch.toolkit.horovod import average_by_horovod

        _move(model, optimizer, context.device)
        average_by_horovod(model, optimizer, chosen)
    else:
        _move(model, optimizer, context.device)
        model = DistributedDataParallel(
            model,
            device_ids=None if context.device.type == "cpu" else [context.device],
            bucket_cap_mb=chosen.bucket_mb,
            find_unused_parameters=chosen.find_unused_parameters,
            static_graph=chosen.static_graph,
        )
    _watch_data(model, context)
    return model if optimizer is None else (model, optimizer)


def _watch_data(model: nn.Module, context: Context) -> None:
    """Have the workers warn, once, if all of them train the first model on the same data."""
    global _watches  # noqa: PLW0603 - once a process
    if context.world_size > 1 and not _watches:
        _watches = True
        FirstBatches(model, group_store(), world_size=context.world_size, attempt=context.attempt)


def _check(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    if isinstance(model, DistributedDataParallel) or "FSDPModule" in {
        base.__name__ for base in type(model).__mro__
    }:
        raise ToolkitError(f"{type(model).__name__} is wrapped already")
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        which = "parameters that require a gradient" if parameters else "parameters"
        raise ToolkitError(
            f"{type(model).__name__} has no {which}",
            hint="wrap() takes the whole model, and only one that is trained",
        )
    if any(tensor.is_meta for tensor in [*parameters, *model.buffers()]):
        raise ToolkitError(
            f"{type(model).__name__} is on the meta device: it has no values that all workers "
            "could start with",
            hint="make the model on the CPU; wrap() moves it",
        )
    if optimizer is not None:
        trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if trained.isdisjoint(map(id, parameters)):
            raise ToolkitError(
                f"the {type(optimizer).__name__} trains no parameter of {type(model).__name__}",
                hint="make the optimizer of model.parameters(), before wrap() or after it",
            )


def _move(model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
    """Move the model, and what the optimizer keeps beside each parameter."""
    model.to(device)
    if optimizer is not None and optimizer.state and device.type != "cpu":
        load_optimizer_state(optimizer, optimizer.state_dict())
