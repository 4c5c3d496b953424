"""The GPUs that a node has, as far as it can tell without torch."""

from __future__ import annotations

from typing import Literal

from distlaunch.core.model.record import Record


class MigDevice(Record):
    """One MIG slice of an NVIDIA GPU; ``uuid`` is what CUDA_VISIBLE_DEVICES takes (``MIG-...``)."""

    uuid: str
    profile: str


class Gpu(Record):
    """One physical GPU. ``index`` is the PCI-bus-order index that CUDA_DEVICE_ORDER=PCI_BUS_ID gives."""

    index: int
    uuid: str | None = None
    name: str = ""
    memory_mib: int | None = None
    vendor: Literal["nvidia", "amd"] = "nvidia"
    numa_node: int | None = None
    mig: tuple[MigDevice, ...] = ()


class GpuInventory(Record):
    """What was found and how; ``problem`` says why there may be more than could be listed (driver broken)."""

    gpus: tuple[Gpu, ...] = ()
    source: Literal["nvml", "nvidia-smi", "device files", "kfd", "mask", "none"] = "none"
    problem: str | None = None
