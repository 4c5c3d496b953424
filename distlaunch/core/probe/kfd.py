"""List AMD GPUs by what the kernel's compute driver says in sysfs."""

from __future__ import annotations

import os

from distlaunch.core.model.gpus import Gpu
from distlaunch.core.probe.files import parse_int, read_text, under

_NODES = "/sys/class/kfd/kfd/topology/nodes"
_DEVICE_MEMORY = {1, 2}
"""Heap types of the GPU's own memory (HSA_MEM_HEAP_TYPE_FB_PUBLIC and _PRIVATE in the kernel's kfd_crat.h)."""


def read_kfd(root: str = "/") -> list[tuple[Gpu, str | None]]:
    """Return each AMD GPU with its PCI bus id, numbered as ROCm numbers them: nodes in order, CPUs left out."""
    base = under(root, _NODES)
    try:
        numbers = sorted(number for name in os.listdir(base) if (number := parse_int(name)) is not None)
    except OSError:
        return []
    found: list[tuple[Gpu, str | None]] = []
    for number in numbers:
        # A GPU that a container withholds has properties that may not be read (EPERM), or no render device.
        properties = parse_properties(read_text(f"{base}/{number}/properties") or "")
        if properties.get("simd_count", 0) > 0 and _usable(root, properties):
            found.append((_gpu(f"{base}/{number}", len(found), properties), _bus_id(properties)))
    return found


def parse_properties(text: str) -> dict[str, int]:
    """Read a node's ``name number`` lines."""
    properties: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        number = parse_int(value)
        if number is not None:
            properties[name] = number
    return properties


def _usable(root: str, properties: dict[str, int]) -> bool:
    minor = properties.get("drm_render_minor", 0)
    return minor <= 0 or os.path.exists(under(root, f"/dev/dri/renderD{minor}"))


def _gpu(directory: str, index: int, properties: dict[str, int]) -> Gpu:
    unique = properties.get("unique_id", 0)
    memory = 0
    for bank in range(properties.get("mem_banks_count", 0)):
        heap = parse_properties(read_text(f"{directory}/mem_banks/{bank}/properties") or "")
        if heap.get("heap_type") in _DEVICE_MEMORY:
            memory += heap.get("size_in_bytes", 0)
    return Gpu(
        index=index,
        uuid=f"GPU-{unique:016x}" if unique else None,
        name=(read_text(f"{directory}/name") or "").strip(),
        memory_mib=memory >> 20 or None,
        vendor="amd",
    )


def _bus_id(properties: dict[str, int]) -> str | None:
    if "location_id" not in properties:
        return None
    location = properties["location_id"]
    return f"{properties.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"
