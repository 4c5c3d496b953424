"""Find the GPUs of this node without torch. A driver that hangs delays the search for a limited
time.

NVIDIA's GPUs are listed by the driver (``nvidia``), AMD's by the kernel's compute driver in sysfs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping

from distlaunch.core.model.record import replace
from distlaunch.core.model.topology import Gpu, GpuInventory
from distlaunch.core.probe.files import parse_int, read_int, read_text, under

DEADLINE_S = 8.0
"""How long the driver may take. Without the persistence daemon it needs seconds to start eight
GPUs."""


def probe_gpus(
    root: str = "/", environ: Mapping[str, str] | None = None, *, deadline_s: float = DEADLINE_S
) -> GpuInventory:
    """Return the GPUs. Never raises, and returns within ``deadline_s`` seconds.

    NVIDIA's GPUs are listed by NVML, else by nvidia-smi, else by their device files. AMD's are
    listed only if there are none of NVIDIA. Without device files the result is empty. ``environ``
    supplies PATH.
    """
    try:
        devices = os.listdir(under(root, "/dev"))
    except OSError:
        return GpuInventory()
    files = sorted(number for name in devices if (number := _device_number(name)) is not None)
    nvidia = GpuInventory()
    if files or "dxg" in devices:
        from distlaunch.core.probe.nvidia import list_gpus

        until_s = time.monotonic() + deadline_s
        listed = list_gpus(root, os.environ if environ is None else environ, until_s=until_s)
        if listed.source is None:
            nvidia = _count_device_files(files, problem=listed.problem)
        else:
            nvidia = GpuInventory(
                gpus=_with_numa_nodes(root, listed.gpus),
                source=listed.source,
                problem=listed.problem,
            )
    if nvidia.gpus or "kfd" not in devices:
        return nvidia

    amd = read_kfd(root)
    return (
        GpuInventory(gpus=_with_numa_nodes(root, amd), source="kfd", problem=nvidia.problem)
        if amd
        else nvidia
    )


def _device_number(name: str) -> int | None:
    digits = name[6:] if name.startswith("nvidia") else ""
    return parse_int(digits) if digits.isdecimal() else None


def _count_device_files(files: list[int], *, problem: str | None) -> GpuInventory:
    """Return one GPU for each device file. WSL has none."""
    # CUDA numbers the devices that it can open from 0: a container may have only nvidia4.
    gpus = tuple(Gpu(index=index) for index in range(len(files)))
    return GpuInventory(gpus=gpus, source="device files" if files else "none", problem=problem)


def _with_numa_nodes(root: str, found: Iterable[tuple[Gpu, str | None]]) -> tuple[Gpu, ...]:
    """Return the GPUs with the NUMA node of their bus. The kernel writes -1 for unknown."""
    gpus: list[Gpu] = []
    for gpu, bus_id in found:
        node = (
            read_int(under(root, f"/sys/bus/pci/devices/{_sysfs_bus_id(bus_id)}/numa_node"))
            if bus_id
            else None
        )
        gpus.append(replace(gpu, numa_node=node if node is not None and node >= 0 else None))
    return tuple(gpus)


def _sysfs_bus_id(bus_id: str) -> str:
    """Return NVIDIA's ``00000000:1B:00.0`` in the kernel's form ``0000:1b:00.0``."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:] if domain.startswith('0000') else domain}:{rest}"


_NODES = "/sys/class/kfd/kfd/topology/nodes"
_DEVICE_MEMORY = {1, 2}
"""Types of the GPU's own memory (HSA_MEM_HEAP_TYPE_FB_PUBLIC and _PRIVATE in the kernel's
kfd_crat.h).
"""


def read_kfd(root: str = "/") -> list[tuple[Gpu, str | None]]:
    """Return each AMD GPU with its PCI bus id, in ROCm's order: the driver's nodes without CPUs."""
    base = under(root, _NODES)
    try:
        numbers = sorted(
            number for name in os.listdir(base) if (number := parse_int(name)) is not None
        )
    except OSError:
        return []
    found: list[tuple[Gpu, str | None]] = []
    for number in numbers:
        # A GPU that a container withholds has unreadable properties (EPERM), or no render device.
        properties = parse_properties(read_text(f"{base}/{number}/properties") or "")
        if properties.get("simd_count", 0) > 0 and _is_usable(root, properties):
            found.append(
                (_read_kfd_gpu(f"{base}/{number}", len(found), properties), _kfd_bus_id(properties))
            )
    return found


def parse_properties(text: str) -> dict[str, int]:
    """Return the properties in ``text``, which has a line ``name number`` for each."""
    properties: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        number = parse_int(value)
        if number is not None:
            properties[name] = number
    return properties


def _is_usable(root: str, properties: dict[str, int]) -> bool:
    minor = properties.get("drm_render_minor", 0)
    return minor <= 0 or os.path.exists(under(root, f"/dev/dri/renderD{minor}"))


def _read_kfd_gpu(directory: str, index: int, properties: dict[str, int]) -> Gpu:
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


def _kfd_bus_id(properties: dict[str, int]) -> str | None:
    if "location_id" not in properties:
        return None
    location = properties["location_id"]
    return f"{properties.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"
