"""Which GPUs this node has, without torch and without trusting the driver to answer.

List AMD GPUs by what the kernel's compute driver says in sysfs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Literal, cast

from distlaunch.core.model.record import replace
from distlaunch.core.model.topology import Gpu, GpuInventory, MigDevice
from distlaunch.core.probe.files import parse_int, read_int, read_text, under

DEADLINE_S = 8.0
"""How long the driver may take: starting eight GPUs without the persistence daemon takes some
seconds."""

NVML_NAME = "libnvidia-ml.so.1"
_NVML_ELSEWHERE = (
    "/usr/lib/wsl/lib/libnvidia-ml.so.1",
    "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
)

_Row = tuple[int, "str | None", str, "int | None", "list[tuple[str, str]]", "str | None"]
_Answer = tuple[Literal["listed", "missing", "failed"], "list[_Row]", "list[str]", int]


def probe_gpus(
    root: str = "/", environ: Mapping[str, str] | None = None, *, deadline_s: float = DEADLINE_S
) -> GpuInventory:
    """Find the GPUs: device files first, and where there are none nothing else is looked at.

    Then NVML, nvidia-smi, and at last the number of device files; AMD's are read from sysfs.
    ``environ`` is where PATH comes from; ``deadline_s`` is how many seconds all the asking may
    take. Never raises, and never hangs.
    """
    try:
        devices = os.listdir(under(root, "/dev"))
    except OSError:
        return GpuInventory()
    files = sorted(number for name in devices if (number := _device_number(name)) is not None)
    nvidia = GpuInventory()
    if files or "dxg" in devices:
        nvidia = _nvidia(
            root, os.environ if environ is None else environ, files, time.monotonic() + deadline_s
        )
    if nvidia.gpus or "kfd" not in devices:
        return nvidia

    amd = read_kfd(root)
    return (
        GpuInventory(gpus=_placed(root, amd), source="kfd", problem=nvidia.problem)
        if amd
        else nvidia
    )


def _device_number(name: str) -> int | None:
    digits = name[6:] if name.startswith("nvidia") else ""
    return parse_int(digits) if digits.isdecimal() else None


def _nvidia(
    root: str, environ: Mapping[str, str], files: list[int], until_s: float
) -> GpuInventory:
    problem: str | None = None
    from distlaunch.core.probe.bounded import in_child, single_threaded

    if single_threaded():
        answer, failure = in_child(lambda: _ask_nvml(root), deadline_s=until_s)
        if failure == "late":
            return _counted(files, problem="the NVIDIA driver hangs: NVML did not answer in time")
        if failure is None:
            verdict, rows, problems, code = cast("_Answer", answer)
            problem = "; ".join(problems) or None
            if verdict == "listed":
                return GpuInventory(
                    gpus=_placed(root, map(_from_row, rows)), source="nvml", problem=problem
                )
            if code in {
                9,
                18,
            }:  # no driver, or another version than the library's: nvidia-smi meets the same
                return GpuInventory(source="nvml", problem=problem)
    return _ask_smi(root, environ, files, until_s, problem)


def _ask_smi(
    root: str, environ: Mapping[str, str], files: list[int], until_s: float, problem: str | None
) -> GpuInventory:
    from distlaunch.core.probe.nvidia import SmiError, find_smi, read_smi

    path = find_smi(root, environ)
    if path is None:
        return _counted(files, problem=problem)
    try:
        found, problems = read_smi(path, environ, deadline_s=until_s)
    except TimeoutError:
        return _counted(files, problem="the NVIDIA driver hangs: nvidia-smi did not answer in time")
    except SmiError as exc:
        return GpuInventory(
            source="nvidia-smi", problem=f"the NVIDIA driver does not answer: {exc}"
        )
    return GpuInventory(
        gpus=_placed(root, found), source="nvidia-smi", problem="; ".join(problems) or None
    )


def _counted(files: list[int], *, problem: str | None) -> GpuInventory:
    """Take the device files for GPUs; under WSL there is none for each GPU, so nothing is known."""
    # CUDA numbers what it can open from 0, whatever the files are called: in a container nvidia4
    # may be the only one.
    gpus = tuple(Gpu(index=index) for index in range(len(files)))
    return GpuInventory(gpus=gpus, source="device files" if files else "none", problem=problem)


def _ask_nvml(root: str) -> _Answer:
    """List the GPUs as plain data; this runs in a child."""
    from distlaunch.core.probe.nvidia import NvmlError, load_nvml, read_nvml

    named = [NVML_NAME] if root == "/" else []  # the linker knows the real root's libraries only
    lib = load_nvml([*named, *(under(root, path) for path in _NVML_ELSEWHERE)])
    if lib is None:
        return ("missing", [], [], 0)
    try:
        found, problems = read_nvml(lib)
    except AttributeError:
        return ("missing", [], [], 0)
    except NvmlError as exc:
        return ("failed", [], [f"the NVIDIA driver does not answer: {exc}"], exc.code)
    rows = [
        (
            gpu.index,
            gpu.uuid,
            gpu.name,
            gpu.memory_mib,
            [(mig.uuid, mig.profile) for mig in gpu.mig],
            bus_id,
        )
        for gpu, bus_id in found
    ]
    return ("listed", rows, problems, 0)


def _from_row(row: _Row) -> tuple[Gpu, str | None]:
    index, uuid, name, memory_mib, slices, bus_id = row
    mig = tuple(MigDevice(uuid=mig_uuid, profile=profile) for mig_uuid, profile in slices)
    return Gpu(index=index, uuid=uuid, name=name, memory_mib=memory_mib, mig=mig), bus_id


def _placed(root: str, found: Iterable[tuple[Gpu, str | None]]) -> tuple[Gpu, ...]:
    """Add the NUMA node that each GPU's bus hangs on; the kernel says -1 where it does not know."""
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
    """Turn NVIDIA's ``00000000:1B:00.0`` into the kernel's ``0000:1b:00.0``."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:] if domain.startswith('0000') else domain}:{rest}"


_NODES = "/sys/class/kfd/kfd/topology/nodes"
_DEVICE_MEMORY = {1, 2}
"""Heap types of the GPU's own memory (HSA_MEM_HEAP_TYPE_FB_PUBLIC and _PRIVATE in the kernel's
kfd_crat.h)."""


def read_kfd(root: str = "/") -> list[tuple[Gpu, str | None]]:
    """Return each AMD GPU with its PCI bus id, numbered as ROCm numbers them: nodes in order, CPUs
    left out."""
    base = under(root, _NODES)
    try:
        numbers = sorted(
            number for name in os.listdir(base) if (number := parse_int(name)) is not None
        )
    except OSError:
        return []
    found: list[tuple[Gpu, str | None]] = []
    for number in numbers:
        # A GPU that a container withholds has properties that may not be read (EPERM), or no render
        # device.
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
