"""Shard a model with FSDP2, and make its optimizer train the shards."""

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
_UNSUPPORTED = {"Adafactor", "Rprop"}
_UNSUPPORTED_FUSED = {"Adagrad", "SGD"}
"""Optimizers of torch 2.13 that raise for DTensors, always or if fused."""
_MAX_SHOWN = 12
_REPLACED = "_distlaunch_replaced"
_CHECKED_OPTIMIZERS: WeakSet[torch.optim.Optimizer] = WeakSet()
_is_watching = False


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    options: WrapOptions,
    context: Context,
) -> None:
    """Copy rank 0's parameters and buffers to all workers, shard the model in place, and make the
    optimizer train the shards.

    The model and each module of ``parts_to_shard`` become FSDP units. Raises ToolkitError if torch,
    the device or the model does not support the options.
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
    _check_support(model, optimizer, options, context)
    parts = parts_to_shard(model, classes=options.wrap_classes, min_params=options.wrap_min_params)
    mesh = _create_mesh(options.sharding, context)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            whole = tensor.to(context.device).contiguous()
            dist.broadcast(whole, 0)
            tensor.data = whole.to(tensor.device)  # FSDP2 requires contiguous tensors
    if options.activation_checkpointing:
        parts = _checkpoint_activations(model, parts)
    precision = _PRECISIONS.get(options.precision)
    reduced = None if precision is None else torch.float32
    on_cpu = context.device.type == "cpu"  # nothing to offload
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy()
        if options.cpu_offload and not on_cpu
        else OffloadPolicy(),
    }
    if options.sharding == "grad":
        arguments["reshard_after_forward"] = False
    name = type(model).__name__
    before = dict(model.named_parameters(remove_duplicate=False))
    for part in reversed(parts):  # the inner ones first
        fully_shard(
            part,
            mp_policy=MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=reduced),
            **arguments,
        )
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=reduced, output_dtype=reduced)
    fully_shard(model, mp_policy=policy, **arguments)
    after = dict(model.named_parameters(remove_duplicate=False))
    replaced = [(old, after[each]) for each, old in before.items()]
    if optimizer is not None:
        replace_parameters(optimizer, replaced)
    for old, new in replaced:
        if old is not new:
            setattr(old, _REPLACED, name)
    _watch_optimizers()


def _check_support(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    options: WrapOptions,
    context: Context,
) -> None:
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
                hint="make it a vector of length 1, or train with --backend pytorch-ddp",
            )
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.sparse
            and module.weight.requires_grad
        ):
            raise ToolkitError(
                f"{name or type(module).__name__} has sparse gradients, which FSDP2 cannot sum up",
                hint="drop sparse=True, or train with --backend pytorch-ddp",
            )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ToolkitError(
            "LBFGS keeps all parameters in one vector, and cannot train those that FSDP2 shards",
            hint="another optimizer, or --backend pytorch-ddp",
        )
    kind = type(optimizer).__name__
    if optimizer is None or type(optimizer) is not getattr(torch.optim, kind, None):
        return
    if kind in _UNSUPPORTED:
        raise ToolkitError(
            f"torch's {kind} cannot step parameters that FSDP2 shards",
            hint="another optimizer, or --backend pytorch-ddp",
        )
    if kind in _UNSUPPORTED_FUSED and any(group.get("fused") for group in optimizer.param_groups):
        raise ToolkitError(
            f"torch's fused {kind} cannot step parameters that FSDP2 shards",
            hint="leave out fused=True",
        )


def _watch_optimizers() -> None:
    """Make an optimizer's step raise ToolkitError if ``wrap`` has replaced its parameters: it would
    train nothing."""
    global _is_watching  # noqa: PLW0603 - torch has one list of such hooks for the process
    if not _is_watching:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(_refuse_replaced_parameters)
        _is_watching = True


def _refuse_replaced_parameters(
    optimizer: torch.optim.Optimizer, args: object, kwargs: object
) -> None:
    del args, kwargs
    if optimizer in _CHECKED_OPTIMIZERS:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (of := getattr(parameter, _REPLACED, None)) is not None:
                raise ToolkitError(
                    f"this {type(optimizer).__name__} trains parameters of {of} that FSDP2 has "
                    "replaced by shards",
                    hint="model, optimizer = wrap(model, optimizer), or make it after wrap()",
                )
    _CHECKED_OPTIMIZERS.add(optimizer)


def parts_to_shard(
    model: nn.Module, *, classes: str = "", min_params: int | None = None
) -> list[nn.Module]:
    """Return the modules of a model that become FSDP units, each before the modules inside it.

    * If ``classes`` (class names, comma-separated) is set: modules of these classes.
    * Else if ``min_params`` is set: the innermost modules with at least that many parameters, not
      counting parameters of modules already chosen inside them.
    * Else: modules of the classes that a Transformers model lists in ``_no_split_modules``, or else
      the items of its outermost module lists.

    Modules that share a parameter with the rest of the model are left out. The model itself is
    never returned, but ``classes`` may name its class. Raises ToolkitError for a class that is not
    in the model.
    """
    modules = [module for module in model.modules() if module is not model]
    wanted = {name.strip() for name in classes.split(",")} - {""}
    if wanted:
        class_names = list(dict.fromkeys(type(module).__name__ for module in modules))
        if missing := sorted(wanted.difference(class_names, [type(model).__name__])):
            shown = ", ".join(class_names[:_MAX_SHOWN]) + (
                ", …" if len(class_names) > _MAX_SHOWN else ""
            )
            raise ToolkitError(
                f"wrap-classes: {type(model).__name__} has no {' and no '.join(missing)}",
                hint=f"it has {shown}"
                if class_names
                else "it has no parts, and is sharded as a whole",
            )
    elif min_params is not None:
        found: list[nn.Module] = []
        for child in model.children():
            _collect_by_size(child, min_params, found)
        return _without_shared_parameters(model, found[::-1])
    else:
        wanted = set(getattr(model, "_no_split_modules", None) or ())
    named = [module for module in modules if type(module).__name__ in wanted]
    if not named and not classes:
        named = [block for each in _outer_module_lists(model) for block in each]
    with_parameters = [module for module in named if next(module.parameters(), None) is not None]
    return _without_shared_parameters(
        model, [module for module in with_parameters if not isinstance(module, _WITHOUT_FORWARD)]
    )


def replace_parameters(
    optimizer: torch.optim.Optimizer, replaced: Sequence[tuple[nn.Parameter, nn.Parameter]]
) -> None:
    """Replace an optimizer's parameters by their shards, and shard the optimizer's state for
    them."""
    new_by_old = {id(old): new for old, new in replaced}
    for group in optimizer.param_groups:
        group["params"] = [new_by_old.get(id(each), each) for each in group["params"]]
    for old, new in replaced:
        state = optimizer.state.pop(old, None)
        if state is not None:
            optimizer.state[new] = {key: sharded_like(value, new) for key, value in state.items()}
    if optimizer.state:  # moves step counts to the device of the shards, where needed
        load_optimizer_state(optimizer, optimizer.state_dict())


def _outer_module_lists(module: nn.Module) -> list[nn.ModuleList]:
    found = []
    for child in module.children():
        found += [child] if isinstance(child, nn.ModuleList) else _outer_module_lists(child)
    return found


def _collect_by_size(module: nn.Module, least: int, found: list[nn.Module]) -> int:
    """Append modules with at least ``least`` parameters. Return the number of remaining parameters."""
    rest = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    # MultiheadAttention uses its children's weights without calling them, which FSDP2 would miss.
    if not isinstance(module, nn.MultiheadAttention):
        rest += sum(_collect_by_size(child, least, found) for child in module.children())
    else:
        rest += sum(
            parameter.numel() for child in module.children() for parameter in child.parameters()
        )
    if rest < least or isinstance(module, _WITHOUT_FORWARD):
        return rest
    found.append(module)
    return 0


def _without_shared_parameters(model: nn.Module, parts: list[nn.Module]) -> list[nn.Module]:
    """Leave out modules that share a parameter: two FSDP units cannot shard the same one."""
    places = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))

    def is_unshared(part: nn.Module) -> bool:
        inside = Counter(id(each) for _, each in part.named_parameters(remove_duplicate=False))
        return all(places[each] == count for each, count in inside.items())

    return [part for part in parts if is_unshared(part)]


def _create_mesh(sharding: str, context: Context) -> DeviceMesh:
    """Return a mesh of all workers; for hybrid sharding, one of nodes and workers per node.

    Raises ToolkitError for hybrid sharding if the nodes have different numbers of workers.
    """
    from torch.distributed.device_mesh import init_device_mesh

    kind, world, local = context.device.type, context.world_size, context.local_world_size
    if sharding != "hybrid":
        return init_device_mesh(kind, (world,), mesh_dim_names=("shard",))
    own = torch.tensor([local], device=context.device)
    gathered = [torch.zeros_like(own) for _ in range(world)]
    dist.all_gather(gathered, own)
    sizes = [int(size) for size in gathered]
    if set(sizes) != {local} or world % local:
        shown = ", ".join(str(size) for size in sizes[:_MAX_SHOWN])
        raise ToolkitError(
            "sharding hybrid needs the same number of workers on each node; by rank, the nodes "
            f"have {shown}",
            hint="use -o sharding=full; LOCAL_WORLD_SIZE is the number of workers of a node",
        )
    return init_device_mesh(kind, (world // local, local), mesh_dim_names=("replicate", "shard"))


def _checkpoint_activations(model: nn.Module, parts: list[nn.Module]) -> list[nn.Module]:
    """Checkpoint the outermost of the given modules. Return the modules, wrapped where enabled.

    Raises ToolkitError if there are none.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointWrapper,
        apply_activation_checkpointing,
    )

    inner = {id(module) for part in parts for module in part.modules() if module is not part}
    outer = {id(part) for part in parts} - inner
    if not outer:
        raise ToolkitError(
            f"activation-checkpointing: {type(model).__name__} has no parts that are known to be "
            "suitable",
            hint="name the classes of its parts: -o wrap-classes=Block",
        )
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in outer)
    wrappers = [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
    wrapper_by_part = {id(next(wrapper.children())): wrapper for wrapper in wrappers}
    return [wrapper_by_part.get(id(part), part) for part in parts]
