"""FSDP2: which parts of a model are sharded for themselves, and an optimizer that follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from distlaunch.toolkit.optimizer_state import load_optimizer_state
from distlaunch.toolkit.sharded_tensors import sharded_like
from distlaunch.toolkit.toolkit_error import ToolkitError
from distlaunch.toolkit.wrap_options import WrapOptions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from distlaunch.toolkit.context import Context

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_NOT_ON_SHARDS = {"Adafactor", "Rprop"}
_FUSED_NOT_ON_SHARDS = {"Adagrad", "SGD"}
"""Optimizers of torch 2.13 that raise for DTensors, or do so where they are fused."""
_SHOWN = 12
_REPLACED = "_distlaunch_replaced"
_FOUND_RIGHT: WeakSet[torch.optim.Optimizer] = WeakSet()
_watching = False


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    options: WrapOptions,
    context: Context,
) -> None:
    """Shard a model in place, and have the optimizer train the shards.

    A part is gathered when its forward or backward begins, and freed after it: the whole model is
    one, and each of its ``units``. One part at a time is on the device whole. Raises ToolkitError.
    """
    try:
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )
    except ImportError as exc:
        raise ToolkitError(
            f"torch {torch.__version__} has no FSDP2", hint="pip install 'torch>=2.6'"
        ) from exc
    _check(model, optimizer, options, context)
    parts = units(model, classes=options.wrap_classes, min_params=options.wrap_min_params)
    mesh = _mesh(options.sharding, context)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            whole = tensor.to(context.device).contiguous()
            dist.broadcast(whole, 0)
            tensor.data = whole.to(tensor.device)  # FSDP2 takes no other strides
    if options.activation_checkpointing:
        parts = _recompute(model, parts)
    precision = _PRECISIONS.get(options.precision)
    reduced = None if precision is None else torch.float32
    on_cpu = context.device.type == "cpu"  # where all is offloaded anyway
    how: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy()
        if options.cpu_offload and not on_cpu
        else OffloadPolicy(),
    }
    if options.sharding == "grad":
        how["reshard_after_forward"] = False
    name = type(model).__name__
    before = dict(model.named_parameters(remove_duplicate=False))
    for part in reversed(parts):  # the inner ones first
        fully_shard(
            part, mp_policy=MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=reduced), **how
        )
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=reduced, output_dtype=reduced)
    fully_shard(model, mp_policy=policy, **how)
    after = dict(model.named_parameters(remove_duplicate=False))
    replaced = [(old, after[each]) for each, old in before.items()]
    if optimizer is not None:
        follow(optimizer, replaced)
    for old, new in replaced:
        if old is not new:
            setattr(old, _REPLACED, name)
    _watch_optimizers()


def _check(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    options: WrapOptions,
    context: Context,
) -> None:
    """Raise ToolkitError for what FSDP2 or the device cannot have."""
    if options.precision == "fp16" and context.device.type == "cpu":
        raise ToolkitError(
            "precision fp16 needs a GPU: on CPUs its gradients vanish", hint="-o precision=bf16"
        )
    on_cuda = context.device.type == "cuda"
    if (
        options.precision == "bf16"
        and on_cuda
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        device = torch.cuda.get_device_name(context.device)
        raise ToolkitError(f"{device} does not compute in bf16", hint="-o precision=fp16")
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ToolkitError(
                f"{name} is a single number, which FSDP2 cannot shard",
                hint="make it a vector of one, torch.ones(1), or train with --backend pytorch-ddp",
            )
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.sparse
            and module.weight.requires_grad
        ):
            raise ToolkitError(
                f"{name or type(module).__name__} has sparse gradients, which FSDP2 cannot sum up",
                hint="make it without sparse=True, or train with --backend pytorch-ddp",
            )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ToolkitError(
            "LBFGS keeps all parameters in one vector, and cannot train those that FSDP2 shards",
            hint="another optimizer, or --backend pytorch-ddp",
        )
    kind = type(optimizer).__name__
    if optimizer is None or type(optimizer) is not getattr(torch.optim, kind, None):
        return
    if kind in _NOT_ON_SHARDS:
        raise ToolkitError(
            f"torch's {kind} cannot step parameters that FSDP2 shards",
            hint="another optimizer, or --backend pytorch-ddp",
        )
    if kind in _FUSED_NOT_ON_SHARDS and any(group.get("fused") for group in optimizer.param_groups):
        raise ToolkitError(
            f"torch's fused {kind} cannot step parameters that FSDP2 shards",
            hint="leave out fused=True",
        )


def _watch_optimizers() -> None:
    """Have an optimizer refused that was made before ``wrap`` and not given to it: it would train
    nothing."""
    global _watching  # noqa: PLW0603 - torch has one list of such hooks for the process
    if not _watching:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(_refuse_old)
        _watching = True


def _refuse_old(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    del args, kwargs
    if optimizer in _FOUND_RIGHT:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (of := getattr(parameter, _REPLACED, None)) is not None:
                raise ToolkitError(
                    f"this {type(optimizer).__name__} trains parameters of {of} that FSDP2 has "
                    "replaced by shards",
                    hint="model, optimizer = wrap(model, optimizer), or make it after wrap()",
                )
    _FOUND_RIGHT.add(optimizer)


def units(model: nn.Module, *, classes: str = "", min_params: int | None = None) -> list[nn.Module]:
    """Return the parts of a model to shard for themselves, each before those within it.

    Those of ``classes`` (names with commas between); or from below all of ``min_params`` parameters
    and more that are not in another; or else the classes that a Transformers model names
    (``_no_split_modules``), else what its module lists hold. What shares a parameter with the rest
    of the model stays with that. The model itself is no part: it is sharded anyway, and its class
    may be among ``classes``. Raises ToolkitError for a class that is not there.
    """
    modules = [module for module in model.modules() if module is not model]
    wanted = {name.strip() for name in classes.split(",")} - {""}
    if wanted:
        there = list(dict.fromkeys(type(module).__name__ for module in modules))
        if missing := sorted(wanted.difference(there, [type(model).__name__])):
            shown = ", ".join(there[:_SHOWN]) + (", …" if len(there) > _SHOWN else "")
            raise ToolkitError(
                f"wrap-classes: {type(model).__name__} has no {' and no '.join(missing)}",
                hint=f"it has {shown}" if there else "it has no parts, and is sharded as a whole",
            )
    elif min_params is not None:
        found: list[nn.Module] = []
        for child in model.children():
            _by_size(child, min_params, found)
        return _apart(model, found[::-1])
    else:
        wanted = set(getattr(model, "_no_split_modules", None) or ())
    named = [module for module in modules if type(module).__name__ in wanted]
    if not named and not classes:
        named = [block for each in _outer_lists(model) for block in each]
    with_parameters = [module for module in named if next(module.parameters(), None) is not None]
    return _apart(
        model, [module for module in with_parameters if not isinstance(module, _WITHOUT_FORWARD)]
    )


def follow(
    optimizer: torch.optim.Optimizer, replaced: Sequence[tuple[nn.Parameter, nn.Parameter]]
) -> None:
    """Put new parameters in the place of the ones that an optimizer trains, and shard what it keeps
    beside them."""
    new_by_old = {id(old): new for old, new in replaced}
    for group in optimizer.param_groups:
        group["params"] = [new_by_old.get(id(each), each) for each in group["params"]]
    for old, new in replaced:
        state = optimizer.state.pop(old, None)
        if state is not None:
            optimizer.state[new] = {key: sharded_like(value, new) for key, value in state.items()}
    if optimizer.state:  # counts of steps may have to be where the shards are
        load_optimizer_state(optimizer, optimizer.state_dict())


def _outer_lists(module: nn.Module) -> list[nn.ModuleList]:
    found = []
    for child in module.children():
        found += [child] if isinstance(child, nn.ModuleList) else _outer_lists(child)
    return found


def _by_size(module: nn.Module, least: int, found: list[nn.Module]) -> int:
    """Collect modules of at least so many parameters, those in collected ones not counted; return
    the rest's number."""
    rest = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    if not isinstance(
        module, nn.MultiheadAttention
    ):  # it uses the weights of a part without calling it
        rest += sum(_by_size(child, least, found) for child in module.children())
    else:
        rest += sum(
            parameter.numel() for child in module.children() for parameter in child.parameters()
        )
    if rest < least or isinstance(module, _WITHOUT_FORWARD):
        return rest
    found.append(module)
    return 0


def _apart(model: nn.Module, parts: list[nn.Module]) -> list[nn.Module]:
    """Leave out what holds a parameter that stands outside of it, too: two parts cannot both shard
    it."""
    places = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))

    def alone(part: nn.Module) -> bool:
        inside = Counter(id(each) for _, each in part.named_parameters(remove_duplicate=False))
        return all(places[each] == count for each, count in inside.items())

    return [part for part in parts if alone(part)]


def _mesh(sharding: str, context: Context) -> DeviceMesh:
    """Arrange all workers in a row, or for hybrid sharding in rows of a node each."""
    from torch.distributed.device_mesh import init_device_mesh

    kind, world, local = context.device.type, context.world_size, context.local_world_size
    if sharding != "hybrid":
        return init_device_mesh(kind, (world,), mesh_dim_names=("shard",))
    own = torch.tensor([local], device=context.device)
    told = [torch.zeros_like(own) for _ in range(world)]
    dist.all_gather(told, own)
    sizes = [int(size) for size in told]
    if set(sizes) != {local} or world % local:
        shown = ", ".join(str(size) for size in sizes[:_SHOWN])
        raise ToolkitError(
            f"sharding hybrid needs as many workers on each node; by rank, the nodes have {shown}",
            hint="-o sharding=full takes any number, and LOCAL_WORLD_SIZE says how many a node has",
        )
    return init_device_mesh(kind, (world // local, local), mesh_dim_names=("replicate", "shard"))


def _recompute(model: nn.Module, parts: list[nn.Module]) -> list[nn.Module]:
    """Have the parts' activations computed again in backward; return the parts as they are to be
    sharded."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointWrapper,
        apply_activation_checkpointing,
    )

    inner = {id(module) for part in parts for module in part.modules() if module is not part}
    outer = {id(part) for part in parts} - inner
    if not outer:
        raise ToolkitError(
            f"activation-checkpointing: which parts of {type(model).__name__} are to be computed "
            "again is not known",
            hint="name their classes: -o wrap-classes=Block",
        )
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in outer)
    wrappers = [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
    wrapper_by_part = {id(next(wrapper.children())): wrapper for wrapper in wrappers}
    return [wrapper_by_part.get(id(part), part) for part in parts]
