"""Layer backends: PyTorch's own environment (``env://``), for DDP and every script written for torchrun."""

from __future__ import annotations

from collections.abc import Mapping

from distlaunch.core.model.topology import Topology

name = "pytorch-ddp"


def job_variables(topology: Topology) -> Mapping[str, str]:
    """Add nothing: what all workers get is already what torch reads."""
    del topology
    return {}


def default_variables(topology: Topology) -> Mapping[str, str]:
    """Add nothing that all workers do not have."""
    del topology
    return {}
