"""API for training scripts: ``from distlaunch.toolkit import init, wrap, heartbeat``.

Names are imported lazily, so that importing ``heartbeat`` alone does not import torch.
"""

from __future__ import annotations

from distlaunch.toolkit.progress import heartbeat

TYPE_CHECKING = False  # importing typing takes long
if TYPE_CHECKING:
    from distlaunch.toolkit.batches import StatefulBatchSampler
    from distlaunch.toolkit.checkpoint.checkpoint import Checkpoint, Stopped
    from distlaunch.toolkit.checkpoint.storage import CheckpointError
    from distlaunch.toolkit.context import Context, init
    from distlaunch.toolkit.toolkit_error import ToolkitError
    from distlaunch.toolkit.wrap_model import wrap

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Context",
    "StatefulBatchSampler",
    "Stopped",
    "ToolkitError",
    "heartbeat",
    "init",
    "wrap",
]

_MODULES = {
    "Checkpoint": "checkpoint.checkpoint",
    "CheckpointError": "checkpoint.storage",
    "Context": "context",
    "StatefulBatchSampler": "batches",
    "Stopped": "checkpoint.checkpoint",
    "ToolkitError": "toolkit_error",
    "init": "context",
    "wrap": "wrap_model",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
