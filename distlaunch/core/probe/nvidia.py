"""List NVIDIA GPUs through NVML, the library below nvidia-smi.

Functions, structures and error numbers are those of NVML's API reference (nvml.h); no binding package is needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from distlaunch.core.model.gpus import Gpu, MigDevice

_NO_PERMISSION = 4
_ERRORS = {
    4: "no permission",
    9: "driver not loaded",
    10: "timeout",
    12: "library not found",
    15: "GPU is lost (it fell off the bus: only a reboot brings it back)",
    16: "GPU needs a reset",
    17: "the operating system refuses access to the GPU",
    18: "driver/library version mismatch",
    19: "GPU is in use",
    20: "not enough memory",
}
_TEXT_BYTES = 96
"""Longest name or UUID that NVML writes (NVML_DEVICE_NAME_V2_BUFFER_SIZE)."""


class NvmlLibrary(Protocol):
    """NVML's C functions: each returns 0 or an error number."""

    def __getattr__(self, name: str, /) -> Callable[..., Any]:
        """Return the function of that name, or raise AttributeError in an old library."""


class NvmlError(Exception):
    """NVML cannot list the GPUs; ``code`` is its error number."""

    def __init__(self, code: int) -> None:
        super().__init__(f"{_ERRORS.get(code, 'unknown error')} (NVML error {code})")
        self.code = code


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Pci(ctypes.Structure):
    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("device_id", ctypes.c_uint),
        ("subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


def load_nvml(names: Iterable[str]) -> NvmlLibrary | None:
    """Load the first of these libraries that is there."""
    return next(filter(None, map(_load, names)), None)


def _load(name: str) -> NvmlLibrary | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def read_nvml(lib: NvmlLibrary) -> tuple[list[tuple[Gpu, str | None]], list[str]]:
    """Return each GPU with its PCI bus id, and a line for each that is there but cannot be used.

    Raises NvmlError if the driver does not answer, AttributeError if this is no usable NVML.
    """
    _must(lib.nvmlInit_v2())
    try:
        count = ctypes.c_uint()
        _must(lib.nvmlDeviceGetCount_v2(ctypes.pointer(count)))
        found: list[tuple[Gpu, str | None]] = []
        problems: list[str] = []
        hidden = 0
        for number in range(count.value):
            device = ctypes.c_void_p()
            code = lib.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(number), ctypes.pointer(device))
            if code == _NO_PERMISSION:
                # Counted, but not ours (a cgroup withholds it): CUDA numbers only those that it may open.
                hidden += 1
            elif code:
                problems.append(f"GPU {number - hidden}: {NvmlError(code)}")
            else:
                gpu, enabled = _describe(lib, device, number - hidden)
                if enabled and not gpu.mig:
                    problems.append(f"GPU {gpu.index} is in MIG mode but has no MIG instance, so nothing can run on it")
                else:
                    found.append((gpu, _bus_id(lib, device)))
    finally:
        lib.nvmlShutdown()
    return found, problems


def _must(code: int) -> None:
    if code:
        raise NvmlError(code)


def _describe(lib: NvmlLibrary, device: ctypes.c_void_p, index: int) -> tuple[Gpu, bool]:
    memory = _Memory()
    known = not lib.nvmlDeviceGetMemoryInfo(device, ctypes.pointer(memory))
    enabled, slices = _mig(lib, device)
    gpu = Gpu(
        index=index,
        uuid=_text(lib.nvmlDeviceGetUUID, device) or None,
        name=_text(lib.nvmlDeviceGetName, device),
        memory_mib=memory.total >> 20 if known and memory.total else None,
        mig=slices,
    )
    return gpu, enabled


def _text(function: Callable[..., Any], device: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    return "" if function(device, buffer, ctypes.c_uint(_TEXT_BYTES)) else buffer.value.decode(errors="replace")


def _bus_id(lib: NvmlLibrary, device: ctypes.c_void_p) -> str | None:
    pci = _Pci()
    if lib.nvmlDeviceGetPciInfo_v3(device, ctypes.pointer(pci)):
        return None
    return bytes(pci.bus_id).decode(errors="replace") or None


def _mig(lib: NvmlLibrary, device: ctypes.c_void_p) -> tuple[bool, tuple[MigDevice, ...]]:
    """Tell whether the GPU is cut into slices, and which there are; drivers before 450 know no MIG."""
    current, pending, most = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    try:
        if lib.nvmlDeviceGetMigMode(device, ctypes.pointer(current), ctypes.pointer(pending)) or not current.value:
            return False, ()
        if lib.nvmlDeviceGetMaxMigDeviceCount(device, ctypes.pointer(most)):
            return True, ()
    except AttributeError:
        return False, ()
    slices: list[MigDevice] = []
    for number in range(most.value):
        handle = ctypes.c_void_p()
        if lib.nvmlDeviceGetMigDeviceHandleByIndex(device, ctypes.c_uint(number), ctypes.pointer(handle)):
            continue  # places are numbered, and not every one is taken
        uuid = _text(lib.nvmlDeviceGetUUID, handle)
        if uuid:
            # The slice's name is the GPU's, then "MIG" and its profile.
            slices.append(MigDevice(uuid=uuid, profile=_text(lib.nvmlDeviceGetName, handle).rpartition(" MIG ")[2]))
    return True, tuple(slices)
