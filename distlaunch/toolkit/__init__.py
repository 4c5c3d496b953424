"""Layer toolkit: the worker side, for training scripts: ``from distlaunch.toolkit import init, wrap, heartbeat``.

A name is imported when it is asked for, so that ``heartbeat`` alone does not import torch.
"""

from __future__ import annotations

from distlaunch.toolkit.progress import heartbeat

TYPE_CHECKING = False  # typing's is dear to import
if TYPE_CHECKING:
    from distlaunch.toolkit.batches import StatefulBatchSampler
    from distlaunch.toolkit.checkpoint import Checkpoint
    from distlaunch.toolkit.context import Context, init
    from distlaunch.toolkit.wrapping import wrap

__all__ = ["Checkpoint", "Context", "StatefulBatchSampler", "heartbeat", "init", "wrap"]

_MODULES = {
    "Checkpoint": "checkpoint",
    "Context": "context",
    "StatefulBatchSampler": "batches",
    "init": "context",
    "wrap": "wrapping",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
