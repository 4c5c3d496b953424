"""Layer toolkit: which device a worker trains on."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from distlaunch.core.model.variables import DEVICE_MASKS
from distlaunch.toolkit.errors import ToolkitError

_NONE_VISIBLE = {"", "-1"}


def choose_device(asked: str | None, local_rank: int, *, shared: bool, environ: Mapping[str, str]) -> torch.device:
    """Choose the device of this local rank. Raises ToolkitError where it is not there.

    ``shared``: more workers than devices take them in turn.
    """
    there = _accelerator()
    if asked is None:
        if there is None and "DISTLAUNCH_JOB_ID" in environ:
            _refuse_idle_devices(environ)
        asked = there or "cpu"
    elif asked not in {"cpu", there}:
        seen = f"only {there}" if there else "no accelerator"
        raise ToolkitError(
            f"init(device={asked!r}): torch {torch.__version__} sees {seen} here",
            hint="leave device out to take what is there",
        )
    if asked == "cpu":
        return torch.device("cpu")
    count = getattr(torch, asked).device_count()
    if local_rank >= count and not shared:
        raise ToolkitError(
            f"local rank {local_rank} has no device: torch sees {count} of {asked} here",
            hint='start no more workers than devices, or have them share: init(backend="gloo")',
        )
    return torch.device(asked, local_rank % count)


def _accelerator() -> str | None:
    if torch.cuda.is_available():
        return "cuda"
    found = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None  # from torch 2.6 on
    return found.type if found is not None and getattr(torch, found.type).is_available() else None


def _refuse_idle_devices(environ: Mapping[str, str]) -> None:
    """Raise ToolkitError where the launcher gave devices to this worker: it is not meant to train on the CPU."""
    for name in sorted(DEVICE_MASKS):
        if environ.get(name, "") not in _NONE_VISIBLE:
            raise ToolkitError(
                f"{name}={environ[name]}, but torch {torch.__version__} sees no accelerator",
                hint="is that torch built for it, and is the driver new enough? init(device='cpu') trains without",
            )
