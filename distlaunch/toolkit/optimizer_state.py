"""Match an optimizer's parameter groups with a checkpoint's, and load optimizer state.

Groups have no names. Two match if they have the same parameters, in any order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

_MAX_SHOWN = 3
_FUSED = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad
"""Optimizers that have fused kernels."""


def match_groups(
    here: Sequence[Collection[str]], there: Sequence[Collection[str]]
) -> tuple[dict[int, int], list[str]]:
    """Match each parameter group with the checkpoint's group of the same parameters.

    ``here`` and ``there`` list the parameters of each group. Return the checkpoint's group by the
    optimizer's, complete if there are no differences, and these as texts.
    """
    free = dict(enumerate(map(frozenset, there)))
    found: dict[int, int] = {}
    for number, names in enumerate(map(frozenset, here)):
        same = next((other for other, others in free.items() if others == names), None)
        if same is not None:
            found[number] = same
            del free[same]
    all_here, all_there = frozenset().union(*here), frozenset().union(*there)
    differing = [f"{name} is only here" for name in sorted(all_here - all_there)]
    differing += [f"{name} is only in the checkpoint" for name in sorted(all_there - all_here)]
    if not differing:
        moved: set[str] = set()
        for number, names in enumerate(map(frozenset, here)):
            if number not in found:
                nearest = max(
                    free.values(), key=lambda others: len(others & names), default=frozenset()
                )
                moved |= names ^ nearest
        differing = [f"{name} is in another parameter group here" for name in sorted(moved)]
    if not differing and len(here) != len(there):
        differing = [
            f"there are {len(here)} parameter groups here and {len(there)} in the checkpoint"
        ]
    return found, differing


def differing_classes(
    here: Sequence[str],
    there: Sequence[str],
    names: Sequence[Collection[str]],
    found: dict[int, int],
) -> list[str]:
    """Return texts about groups whose optimizer has another class than in the checkpoint.

    ``found``: the result of ``match_groups``.
    """
    return [
        f"{_shown_names(names[number])}: the optimizer was {there[other]}, and is {here[number]} here"
        for number, other in found.items()
        if here[number] != there[other]
    ]


def differing_sizes(
    optimizer: torch.optim.Optimizer,
    fused: Sequence[object],
    sizes: Mapping[int, Mapping[str, Sequence[int]]],
) -> list[tuple[torch.Tensor, str]]:
    """Return states whose size differs from their parameter's although a fused kernel would accept
    them.

    Fused kernels on CPUs would read and write beyond the end. ``sizes``: the sizes of a parameter's
    states, by its id. Return the parameters, each with a text.
    """
    if not isinstance(optimizer, _FUSED):
        return []
    return [
        (parameter, f"{key} is {list(size)}, and its parameter is {list(parameter.shape)}")
        for group, is_fused in zip(optimizer.param_groups, fused, strict=True)
        if not (is_fused is None or is_fused is False)
        for parameter in group["params"]
        for key, size in sizes.get(id(parameter), {}).items()
        if key != "step" and list(size) != list(parameter.shape)
    ]


def _shown_names(names: Collection[str]) -> str:
    if not names:
        return "a parameter group without parameters"
    more = f" and {len(names) - _MAX_SHOWN:,} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(list(names)[:_MAX_SHOWN]) + more


def load_optimizer_state(optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> None:
    """Load a ``state_dict`` without changing the types of its tensors, except step counts.

    torch would convert the fp32 state of a bf16 weight to bf16. Devices and step counts are left to
    torch, because a fused optimizer needs the counts on the device.
    """
    optimizer.load_state_dict(whole)
    for group, saved in zip(optimizer.param_groups, whole["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            loaded = optimizer.state.get(parameter, {})
            for key, value in whole["state"].get(number, {}).items():
                if key != "step" and key in loaded:
                    loaded[key] = _with_saved_types(loaded[key], value)


def _with_saved_types(loaded: Any, saved: Any) -> Any:
    """Return loaded state with the number types, and the values that are no tensors, of ``saved``."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {key: _with_saved_types(each, saved.get(key)) for key, each in loaded.items()}
    if (
        type(loaded) in {list, tuple}
        and isinstance(saved, list | tuple)
        and len(loaded) == len(saved)
    ):
        return type(loaded)(map(_with_saved_types, loaded, saved))
    # torch's load_state_dict turns a str into the text of a generator object.
    return loaded if isinstance(loaded, torch.Tensor) else saved
