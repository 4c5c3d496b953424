"""Which device a worker trains on."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from distlaunch.core.model.variables import DEVICE_MASKS
from distlaunch.toolkit.toolkit_error import ToolkitError

_NONE_VISIBLE = {"", "-1"}


def choose_device(
    asked: str | torch.device | None, local_rank: int, *, shared: bool, environ: Mapping[str, str]
) -> torch.device:
    """Choose the device of this local rank. Raises ToolkitError where it is not there.

    ``shared``: more workers than devices take them in turn.
    """
    there = _accelerator()
    if asked is None:
        if there is None and "DISTLAUNCH_JOB_ID" in environ:
            _refuse_idle_devices(environ)
        kind = there or "cpu"
    else:
        kind = _kind(asked, there)
    if kind == "cpu":
        return torch.device("cpu")
    count = getattr(torch, kind).device_count()
    if count == 1 and local_rank and not shared:
        raise ToolkitError(
            f"local rank {local_rank} has no device: torch sees one of {kind} here",
            hint="where each worker is given a device of its own (srun --gpus-per-task), have LOCAL_RANK=0 set for "
            'all; else start no more workers than devices, or have them share: init(backend="gloo")',
        )
    if local_rank >= count and not shared:
        raise ToolkitError(
            f"local rank {local_rank} has no device: torch sees {count} of {kind} here",
            hint='start no more workers than devices, or have them share: init(backend="gloo")',
        )
    return torch.device(kind, local_rank % count)


def _kind(asked: str | torch.device, there: str | None) -> str:
    """Read which kind of device was asked for; the local rank chooses among those of a kind."""
    written = f"init(device={str(asked)!r})"
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError) as exc:
        raise ToolkitError(f"{written}: torch knows no such device", hint="'cpu', 'cuda', or leave it out") from exc
    if device.type not in {"cpu", there}:
        seen = f"only {there}" if there else "no accelerator"
        raise ToolkitError(
            f"{written}: torch {torch.__version__} sees {seen} here", hint="leave device out to take what is there"
        )
    if device.type != "cpu" and device.index is not None:
        raise ToolkitError(
            f"{written}: the local rank chooses which one", hint=f"init(device={device.type!r}), or distlaunch --gpus"
        )
    return device.type


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
