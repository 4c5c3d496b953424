"""List NVIDIA GPUs through NVML, the library below nvidia-smi.

Functions, structures and error numbers are those of NVML's API reference (nvml.h); no binding
package is needed.

List NVIDIA GPUs by what ``nvidia-smi`` prints.

Which processes still hold memory on this node's NVIDIA GPUs.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.topology import Gpu, MigDevice
from distlaunch.core.probe.files import parse_int, under

if TYPE_CHECKING:
    import subprocess

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
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


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
                # Counted, but not ours (a cgroup withholds it): CUDA numbers only those that it may
                # open.
                hidden += 1
            elif code:
                problems.append(f"GPU {number - hidden}: {NvmlError(code)}")
            else:
                gpu, enabled = _describe(lib, device, number - hidden)
                if enabled and not gpu.mig:
                    problems.append(
                        f"GPU {gpu.index} is in MIG mode but has no MIG instance, so nothing can "
                        "run on it"
                    )
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
    return (
        ""
        if function(device, buffer, ctypes.c_uint(_TEXT_BYTES))
        else buffer.value.decode(errors="replace")
    )


def _bus_id(lib: NvmlLibrary, device: ctypes.c_void_p) -> str | None:
    pci = _Pci()
    if lib.nvmlDeviceGetPciInfo_v3(device, ctypes.pointer(pci)):
        return None
    return bytes(pci.bus_id).decode(errors="replace") or None


def _mig(lib: NvmlLibrary, device: ctypes.c_void_p) -> tuple[bool, tuple[MigDevice, ...]]:
    """Tell whether the GPU is cut into slices, and which there are; drivers before 450 know no
    MIG."""
    current, pending, most = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    try:
        if (
            lib.nvmlDeviceGetMigMode(device, ctypes.pointer(current), ctypes.pointer(pending))
            or not current.value
        ):
            return False, ()
        if lib.nvmlDeviceGetMaxMigDeviceCount(device, ctypes.pointer(most)):
            return True, ()
    except AttributeError:
        return False, ()
    slices: list[MigDevice] = []
    for number in range(most.value):
        handle = ctypes.c_void_p()
        if lib.nvmlDeviceGetMigDeviceHandleByIndex(
            device, ctypes.c_uint(number), ctypes.pointer(handle)
        ):
            continue  # places are numbered, and not every one is taken
        uuid = _text(lib.nvmlDeviceGetUUID, handle)
        if uuid:
            # The slice's name is the GPU's, then "MIG" and its profile.
            slices.append(
                MigDevice(
                    uuid=uuid, profile=_text(lib.nvmlDeviceGetName, handle).rpartition(" MIG ")[2]
                )
            )
    return True, tuple(slices)


_QUERY = ("--query-gpu=index,uuid,name,memory.total,pci.bus_id", "--format=csv,noheader,nounits")
_ELSEWHERE = ("/usr/bin", "/usr/local/nvidia/bin", "/usr/lib/wsl/lib")
"""Where the tool lies when PATH does not have it: Debian, device plugins of Kubernetes, WSL."""


class SmiError(Exception):
    """nvidia-smi cannot list the GPUs; the message says what it said."""


class Ran(Record):
    """What a finished command printed (both streams) and its exit code."""

    text: str
    code: int


def find_smi(root: str, environ: Mapping[str, str]) -> str | None:
    """Return the path of nvidia-smi: on PATH, or where distributions put it."""
    places = [
        *environ.get("PATH", "").split(os.pathsep),
        *(under(root, place) for place in _ELSEWHERE),
    ]
    for place in places:
        path = os.path.join(place, "nvidia-smi")
        if place and os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def read_smi(
    path: str, environ: Mapping[str, str], *, deadline_s: float
) -> tuple[list[tuple[Gpu, str | None]], list[str]]:
    """Return each GPU with its PCI bus id, and a line for each that cannot be used.

    ``deadline_s`` is monotonic time. Raises SmiError if the tool fails, TimeoutError if it does not
    end in time.
    """
    listed, queried = _run_both(path, environ, deadline_s)
    gpus, problems = parse_list(listed)
    details = parse_query(queried.text) if queried.code == 0 else {}
    found: list[tuple[Gpu, str | None]] = []
    for gpu in gpus:
        memory_mib, bus_id = details.get(gpu.index, (None, None))
        found.append((replace(gpu, memory_mib=memory_mib), bus_id))
    return found, problems


def parse_list(ran: Ran) -> tuple[list[Gpu], list[str]]:
    """Read ``nvidia-smi -L``: a line for each GPU, below it one for each MIG slice.

    Raises SmiError if there is no GPU among it and the tool complains about more than that.
    """
    gpus: list[Gpu] = []
    others: list[str] = []
    for line in ran.text.splitlines():
        head, _, tail = line.strip().rpartition(" (UUID: ")
        uuid = tail.rstrip(")")
        words = head.split()
        if head.startswith("GPU ") and ":" in head:
            number, _, name = head[4:].partition(":")
            gpus.append(Gpu(index=parse_int(number) or 0, uuid=uuid, name=name.strip()))
        elif head.startswith("MIG ") and gpus:
            gpus[-1] = replace(
                gpus[-1], mig=(*gpus[-1].mig, MigDevice(uuid=uuid, profile=words[1]))
            )
        elif line.strip() and not line.lower().startswith(("no devices", "nvml library version")):
            others.append(line.strip())
    if not gpus and (others or ran.code not in {0, 6}):  # 6: the tool's own code for "no devices"
        raise SmiError(f"{' '.join(others)[:300] or 'nothing'} (nvidia-smi, exit code {ran.code})")
    return gpus, others


def parse_query(text: str) -> dict[int, tuple[int | None, str | None]]:
    """Read the ``--query-gpu`` rows: memory in MiB (None where the tool has ``[N/A]``) and bus id
    by index."""
    rows: dict[int, tuple[int | None, str | None]] = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        index = parse_int(fields[0])
        if len(fields) >= 5 and index is not None:
            rows[index] = (parse_int(fields[-2]), fields[-1])
    return rows


def _run_both(path: str, environ: Mapping[str, str], deadline_s: float) -> tuple[Ran, Ran]:
    """Run both commands at the same time: each spends its time on starting the driver."""
    import subprocess

    processes: list[subprocess.Popen[bytes]] = []
    try:
        for arguments in (("-L",), _QUERY):
            processes.append(  # noqa: PERF401 - if the second cannot start, the first must be known
                subprocess.Popen(
                    [path, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env={**environ, "LC_ALL": "C"},
                )
            )
        first, second = (
            Ran(text=output.decode(errors="replace"), code=process.returncode)
            for process in processes
            for output in (process.communicate(timeout=max(0.0, deadline_s - time.monotonic()))[0],)
        )
    except subprocess.TimeoutExpired as exc:
        raise TimeoutError from exc
    except OSError as exc:
        raise SmiError(f"{path} cannot be run: {exc.strerror}") from exc
    else:
        return first, second
    finally:
        for process in processes:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what still runs; in a wedged driver it stays, and is not waited for."""
    import subprocess

    if process.poll() is None:
        process.kill()
        try:
            process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            process.returncode = -9  # else Popen's destructor warns about it
    if process.stdout is not None:
        process.stdout.close()


_PROCESSES_QUERY = ("--query-compute-apps=pid", "--format=csv,noheader,nounits")
_ASK_S = 5.0
_STEP_S = 0.2


def await_release(
    pids: Collection[int], *, bound_s: float, environ: Mapping[str, str]
) -> tuple[int, ...]:
    """Wait until the driver has taken back the memory of these ended processes; give those that
    still hold some.

    Returns at once where nvidia-smi is missing or does not answer: nothing can be known then.
    """
    path = find_smi("/", environ)
    deadline = time.monotonic() + bound_s
    while path is not None:
        holders = _holders(path)
        left = tuple(sorted(holders & set(pids)))
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(_STEP_S)
    return ()


def _holders(path: str) -> set[int]:
    import subprocess

    try:
        ran = subprocess.run(
            [path, *_PROCESSES_QUERY],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ASK_S,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError):
        return set()
    if ran.returncode != 0:
        return set()
    return {int(word) for word in ran.stdout.decode(errors="replace").split() if word.isdigit()}
