"""Layer backends: PyTorch's own environment (``env://``), for DDP and every script written for torchrun."""

from __future__ import annotations

from distlaunch.backends.base import Backend


class PytorchDdp(Backend):
    """All that torch reads is what all workers get."""

    name = "pytorch-ddp"
    about = "PyTorch's environment (env://): DDP, and every script written for torchrun"
