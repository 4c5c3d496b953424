"""Which group of an optimizer is which one of a checkpoint, and optimizers' states as they were.

Groups have no names. A group is the one of the checkpoint that has the same parameters, whatever
the order of groups and of optimizers is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

_SHOWN = 3


def match_groups(
    here: Sequence[Collection[str]], there: Sequence[Collection[str]]
) -> tuple[dict[int, int], list[str]]:
    """Find for each group here the number of the group of the checkpoint that has the same
    parameters.

    Both list the names of each group's parameters. Returns the numbers there by the numbers here,
    and the differences in words: the numbers are complete only if there are no differences.
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
    """Describe the groups whose optimizer is of another class than in the checkpoint.

    ``here``, ``there``: the class of each group's optimizer. ``names``: of the parameters of each
    group here. ``found``: what ``match_groups`` has returned.
    """
    return [
        f"{_some(names[number])}: the optimizer was {there[other]}, and is {here[number]} here"
        for number, other in found.items()
        if here[number] != there[other]
    ]


def _some(names: Collection[str]) -> str:
    if not names:
        return "a parameter group without parameters"
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(list(names)[:_SHOWN]) + more


def load_optimizer_state(optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> None:
    """Load what ``state_dict()`` has given, each tensor in its own type: a master copy in fp32 of a
    weight in bf16.

    Where it is, and the type of counts of steps, is torch's affair: a fused optimizer has them on
    the device.
    """
    optimizer.load_state_dict(whole)
    for group, saved in zip(optimizer.param_groups, whole["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            loaded = optimizer.state.get(parameter, {})
            for key, value in whole["state"].get(number, {}).items():
                if key != "step" and key in loaded:
                    loaded[key] = _typed(loaded[key], value)


def _typed(loaded: Any, saved: Any) -> Any:
    """Return what torch has loaded, with the types of numbers, and all that is no tensor, as they
    were saved."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {key: _typed(each, saved.get(key)) for key, each in loaded.items()}
    if (
        type(loaded) in {list, tuple}
        and isinstance(saved, list | tuple)
        and len(loaded) == len(saved)
    ):
        return type(loaded)(map(_typed, loaded, saved))
    return (
        loaded if isinstance(loaded, torch.Tensor) else saved
    )  # torch makes a generator's text of a str
