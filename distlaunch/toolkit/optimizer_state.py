"""Layer toolkit: optimizers' states as they were: torch gives all that it loads the parameter's type of numbers."""

from __future__ import annotations

from typing import Any

import torch


def load_optimizer_state(optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> None:
    """Load what ``state_dict()`` has given, each tensor in its own type: a master copy in fp32 of a weight in bf16.

    Where it is, and the type of counts of steps, is torch's affair: a fused optimizer has them on the device.
    """
    optimizer.load_state_dict(whole)
    for group, saved in zip(optimizer.param_groups, whole["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            loaded = optimizer.state.get(parameter, {})
            for key, value in whole["state"].get(number, {}).items():
                if key != "step" and key in loaded:
                    loaded[key] = _typed(loaded[key], value)


def _typed(loaded: Any, saved: Any) -> Any:
    """Put what was saved, where its type differs, in the place of what was made of it."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {key: _typed(each, saved.get(key)) for key, each in loaded.items()}
    if type(loaded) in {list, tuple} and isinstance(saved, list | tuple) and len(loaded) == len(saved):
        return type(loaded)(map(_typed, loaded, saved))
    return loaded
