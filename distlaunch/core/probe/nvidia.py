"""Ask the NVIDIA driver which GPUs this node has, and which processes hold their memory.

NVML, the library of nvidia-smi, is called first; nvidia-smi only if NVML is missing or fails. A
driver may hang or crash, so NVML is loaded in a child process: in a fork, or in a new Python
process if this one has threads. Functions, structures and error numbers are those of NVML's API
reference (nvml.h).
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.topology import Gpu, MigDevice
from distlaunch.core.probe.files import parse_int, under

if TYPE_CHECKING:
    import subprocess

_NVML_PATHS = (
    "/usr/lib/wsl/lib/libnvidia-ml.so.1",
    "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
)
"""Paths of NVML if the linker does not find it: WSL, Kubernetes device plugins."""
NVML_NAME = "libnvidia-ml.so.1"
_ASK_S = 5.0
_STEP_S = 0.2
_BROKEN_DRIVER = {9, 18}
"""NVML's errors for a missing driver and a version mismatch. nvidia-smi would fail, too."""

Question = Literal["gpus", "holders"]
_Answer = tuple[Literal["answered", "missing", "failed"], "list[Any]", "list[str]", int]
"""The child's answer for marshal: status, rows, problems, and NVML's error number."""


# --- the questions


class GpuList(Record):
    """The GPUs in the driver's order, each with its PCI bus id.

    ``source`` is None if nothing could list them. ``problem`` says why some are missing.
    """

    gpus: tuple[tuple[Gpu, str | None], ...] = ()
    source: Literal["nvml", "nvidia-smi"] | None = None
    problem: str | None = None


def list_gpus(root: str, environ: Mapping[str, str], *, until_s: float) -> GpuList:
    """Return the GPUs, or a list with ``problem``. ``until_s`` is monotonic time. Never raises."""
    answer, failure = _ask_nvml("gpus", root, until_s)
    if failure == "late":
        return GpuList(problem="the NVIDIA driver hangs: NVML did not answer in time")
    problem: str | None = None
    if answer is not None:
        verdict, rows, problems, code = answer
        problem = "; ".join(problems) or None
        if verdict == "answered":
            return GpuList(gpus=tuple(map(_from_row, rows)), source="nvml", problem=problem)
        if code in _BROKEN_DRIVER:
            return GpuList(source="nvml", problem=problem)
    path = find_smi(root, environ)
    if path is None:
        return GpuList(problem=problem)
    try:
        found, problems = read_smi(path, environ, until_s=until_s)
    except TimeoutError:
        return GpuList(problem="the NVIDIA driver hangs: nvidia-smi did not answer in time")
    except SmiError as exc:
        return GpuList(source="nvidia-smi", problem=f"the NVIDIA driver does not answer: {exc}")
    return GpuList(gpus=tuple(found), source="nvidia-smi", problem="; ".join(problems) or None)


def memory_holders(root: str, environ: Mapping[str, str], *, until_s: float) -> set[int] | None:
    """Return the pids that hold GPU memory; None if the driver does not report them, or not until
    ``until_s`` (monotonic)."""
    answer, failure = _ask_nvml("holders", root, until_s)
    if answer is not None and answer[0] == "answered":
        return set(answer[1])
    path = find_smi(root, environ)
    if failure == "late" or path is None or (answer is not None and answer[3] in _BROKEN_DRIVER):
        return None
    return _smi_holders(path, environ, until_s)


def await_memory_release(
    pids: Collection[int], *, bound_s: float, environ: Mapping[str, str], root: str = "/"
) -> tuple[int, ...]:
    """Wait until the driver has released the GPU memory of these ended processes, for at most
    ``bound_s``.

    Return the pids that still held memory at the last report of the driver. If the driver does not
    report pids, return none without waiting.
    """
    deadline = time.monotonic() + bound_s
    left: tuple[int, ...] = ()
    while True:
        until_s = min(time.monotonic() + _ASK_S, deadline)
        holders = memory_holders(root, environ, until_s=until_s)
        if holders is None:
            return left if until_s == deadline else ()
        left = tuple(sorted(holders & set(pids)))
        if not left or time.monotonic() + _STEP_S >= deadline:
            return left
        time.sleep(_STEP_S)


# --- NVML in a child


def _ask_nvml(
    question: Question, root: str, until_s: float
) -> tuple[_Answer | None, Literal["late", "died"] | None]:
    """Return the answer of a child process, or how the child failed."""
    from distlaunch.core.probe.isolated_call import is_single_threaded, run_in_child

    libraries = nvml_libraries(root)
    if is_single_threaded():
        answer, failure = run_in_child(
            lambda: answer_by_nvml(question, libraries), deadline_s=until_s
        )
        return cast("_Answer | None", answer), failure
    return _ask_new_python(question, libraries, until_s)


_PROGRAM = """
import marshal, sys
sys.path.insert(0, sys.argv[1])
from distlaunch.core.probe.nvidia import answer_by_nvml
sys.stdout.buffer.write(marshal.dumps(answer_by_nvml(sys.argv[2], sys.argv[3:])))
sys.stdout.buffer.flush()
import os
os._exit(0)
"""


def _ask_new_python(
    question: Question, libraries: Sequence[str], until_s: float
) -> tuple[_Answer | None, Literal["late", "died"] | None]:
    import marshal
    import subprocess

    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, package_path(), question, *libraries],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except (OSError, ValueError):
        return None, "died"
    try:
        data, _ = process.communicate(timeout=max(0.0, until_s - time.monotonic()))
        answer: _Answer = marshal.loads(data)  # noqa: S302 - written by our own program
    except subprocess.TimeoutExpired:
        return None, "late"
    except (EOFError, ValueError, TypeError):
        return None, "died"
    else:
        return answer, None
    finally:
        end_process(process)


def nvml_libraries(root: str) -> list[str]:
    """Return the names and paths at which NVML may be."""
    named = [NVML_NAME] if root == "/" else []  # the linker finds libraries of the real root only
    return [*named, *(under(root, path) for path in _NVML_PATHS)]


def package_path() -> str:
    """Return the directory or zip of this package, as a child process can open it."""
    package = os.path.abspath(__file__)  # in an agent this is /proc/self/fd/N/distlaunch/...
    for _ in range(4):
        package = os.path.dirname(package)
    return package.replace("/proc/self/", f"/proc/{os.getpid()}/")


def answer_by_nvml(question: Question, libraries: Iterable[str]) -> _Answer:
    """Return the answer to a question from the first library that can be loaded."""
    lib = load_nvml(libraries)
    if lib is None:
        return ("missing", [], [], 0)
    try:
        if question == "holders":
            return ("answered", sorted(read_holders(lib)), [], 0)
        found, problems = read_gpus(lib)
    except AttributeError:  # no usable NVML
        return ("missing", [], [], 0)
    except NvmlError as exc:
        return ("failed", [], [f"the NVIDIA driver does not answer: {exc}"], exc.code)
    return ("answered", [_to_row(gpu, bus_id) for gpu, bus_id in found], problems, 0)


def _to_row(gpu: Gpu, bus_id: str | None) -> tuple[Any, ...]:
    slices = [(mig.uuid, mig.profile) for mig in gpu.mig]
    return (gpu.index, gpu.uuid, gpu.name, gpu.memory_mib, slices, bus_id)


def _from_row(row: tuple[Any, ...]) -> tuple[Gpu, str | None]:
    index, uuid, name, memory_mib, slices, bus_id = row
    mig = tuple(MigDevice(uuid=mig_uuid, profile=profile) for mig_uuid, profile in slices)
    return Gpu(index=index, uuid=uuid, name=name, memory_mib=memory_mib, mig=mig), bus_id


# --- NVML itself

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
_INSUFFICIENT_SIZE = 7
_TEXT_BYTES = 96
"""Longest name or UUID that NVML writes (NVML_DEVICE_NAME_V2_BUFFER_SIZE)."""
_MOST_PROCESSES = 1 << 16


class NvmlLibrary(Protocol):
    """NVML's C functions. Each returns 0 or an error number."""

    def __getattr__(self, name: str, /) -> Callable[..., Any]:
        """Return the library's function ``name``. Raises AttributeError if the library is too old
        to have it."""


class NvmlError(Exception):
    """NVML cannot list the GPUs. ``code`` is its error number."""

    def __init__(self, code: int) -> None:
        super().__init__(f"{_ERRORS.get(code, 'unknown error')} (NVML error {code})")
        self.code = code


class NvmlMemory(ctypes.Structure):
    """NVML's structure of the memory of a GPU, in bytes."""

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


class _ProcessV1(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong))


class _ProcessV2(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def load_nvml(names: Iterable[str]) -> NvmlLibrary | None:
    """Return the first of these libraries that can be loaded; None if none can."""
    return next(filter(None, map(_load_library, names)), None)


def _load_library(name: str) -> NvmlLibrary | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def read_gpus(lib: NvmlLibrary) -> tuple[list[tuple[Gpu, str | None]], list[str]]:
    """Return each GPU with its PCI bus id, and a line for each unusable one.

    Raises NvmlError if the driver does not answer, AttributeError if the library lacks a function.
    """
    found: list[tuple[Gpu, str | None]] = []
    problems: list[str] = []
    hidden = 0
    with NvmlSession(lib):
        for number in range(_count_devices(lib)):
            device, code = _open_device(lib, number)
            if code == _NO_PERMISSION:
                # NVML counts a GPU that a cgroup withholds, but CUDA does not.
                hidden += 1
            elif code:
                problems.append(f"GPU {number - hidden}: {NvmlError(code)}")
            else:
                gpu, enabled = _describe_gpu(lib, device, number - hidden)
                if enabled and not gpu.mig:
                    problems.append(
                        f"GPU {gpu.index} is in MIG mode but has no MIG instance, so nothing can "
                        "run on it"
                    )
                else:
                    found.append((gpu, _read_bus_id(lib, device)))
    return found, problems


def each_device(
    lib: NvmlLibrary,
) -> Iterable[tuple[int, ctypes.c_void_p, list[ctypes.c_void_p]]]:
    """Yield CUDA's index, the handle, and the handles of the MIG slices of each usable GPU.

    Raises NvmlError if the driver does not answer, AttributeError if the library lacks a function.
    """
    hidden = 0
    for number in range(_count_devices(lib)):
        device, code = _open_device(lib, number)
        hidden += code == _NO_PERMISSION
        if not code:
            yield number - hidden, device, _mig_handles(lib, device)[1]


def read_holders(lib: NvmlLibrary) -> set[int]:
    """Return the pids that hold GPU memory for computing.

    Raises NvmlError if the driver does not answer, AttributeError if the library lacks a function.
    """
    pids: set[int] = set()
    with NvmlSession(lib):
        for number in range(_count_devices(lib)):
            device, code = _open_device(lib, number)
            if code:
                continue  # withheld or lost
            enabled, slices = _mig_handles(lib, device)
            code = _add_processes(lib, device, pids)
            if code and not enabled:  # in MIG mode only the slices may answer
                raise NvmlError(code)
            for each in slices:
                _check_code(_add_processes(lib, each, pids))
    return pids


class NvmlSession:
    """Context manager: NVML between nvmlInit and nvmlShutdown. Raises NvmlError on entry."""

    def __init__(self, lib: NvmlLibrary) -> None:
        self._lib = lib

    def __enter__(self) -> None:
        _check_code(self._lib.nvmlInit_v2())

    def __exit__(self, *exc: object) -> None:
        self._lib.nvmlShutdown()


def _check_code(code: int) -> None:
    if code:
        raise NvmlError(code)


def _count_devices(lib: NvmlLibrary) -> int:
    count = ctypes.c_uint()
    _check_code(lib.nvmlDeviceGetCount_v2(ctypes.pointer(count)))
    return count.value


def _open_device(lib: NvmlLibrary, number: int) -> tuple[ctypes.c_void_p, int]:
    device = ctypes.c_void_p()
    code = lib.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(number), ctypes.pointer(device))
    return device, code


def _describe_gpu(lib: NvmlLibrary, device: ctypes.c_void_p, index: int) -> tuple[Gpu, bool]:
    memory = NvmlMemory()
    known = not lib.nvmlDeviceGetMemoryInfo(device, ctypes.pointer(memory))
    enabled, handles = _mig_handles(lib, device)
    # The slice's name is the GPU's, then "MIG" and its profile.
    slices = tuple(
        MigDevice(
            uuid=uuid, profile=device_text(lib.nvmlDeviceGetName, handle).rpartition(" MIG ")[2]
        )
        for handle in handles
        if (uuid := device_text(lib.nvmlDeviceGetUUID, handle))
    )
    gpu = Gpu(
        index=index,
        uuid=device_text(lib.nvmlDeviceGetUUID, device) or None,
        name=device_text(lib.nvmlDeviceGetName, device),
        memory_mib=memory.total >> 20 if known and memory.total else None,
        mig=slices,
    )
    return gpu, enabled


def device_text(function: Callable[..., Any], device: ctypes.c_void_p) -> str:
    """Return the text that a function of NVML writes about a device; empty if it fails."""
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    return (
        ""
        if function(device, buffer, ctypes.c_uint(_TEXT_BYTES))
        else buffer.value.decode(errors="replace")
    )


def _read_bus_id(lib: NvmlLibrary, device: ctypes.c_void_p) -> str | None:
    pci = _Pci()
    if lib.nvmlDeviceGetPciInfo_v3(device, ctypes.pointer(pci)):
        return None
    return bytes(pci.bus_id).decode(errors="replace") or None


def _mig_handles(lib: NvmlLibrary, device: ctypes.c_void_p) -> tuple[bool, list[ctypes.c_void_p]]:
    """Return whether the GPU is in MIG mode, and its slices. Drivers before 450 do not know MIG."""
    current, pending, most = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    try:
        if (
            lib.nvmlDeviceGetMigMode(device, ctypes.pointer(current), ctypes.pointer(pending))
            or not current.value
        ):
            return False, []
        if lib.nvmlDeviceGetMaxMigDeviceCount(device, ctypes.pointer(most)):
            return True, []
    except AttributeError:
        return False, []
    handles: list[ctypes.c_void_p] = []
    for number in range(most.value):
        handle = ctypes.c_void_p()
        place = ctypes.c_uint(number)  # not every index is in use
        if not lib.nvmlDeviceGetMigDeviceHandleByIndex(device, place, ctypes.pointer(handle)):
            handles.append(handle)
    return True, handles


def _add_processes(lib: NvmlLibrary, device: ctypes.c_void_p, pids: set[int]) -> int:
    """Add the pids that compute on a device to ``pids``. Return NVML's error number, 0 for
    success."""
    code, found = compute_processes(lib, device)
    pids.update(pid for pid, _ in found)
    return code


def compute_processes(
    lib: NvmlLibrary, device: ctypes.c_void_p
) -> tuple[int, list[tuple[int, int]]]:
    """Return NVML's error number, and (pid, bytes of memory) of processes that compute on a device.

    Calls version 2 of nvmlDeviceGetComputeRunningProcesses, which all drivers since 450 have, or
    version 1. Version 3 had a structure of another length in some releases of driver 535.
    """
    kind: type[_ProcessV1 | _ProcessV2] = _ProcessV2
    try:
        function = lib.nvmlDeviceGetComputeRunningProcesses_v2
    except AttributeError:
        kind, function = _ProcessV1, lib.nvmlDeviceGetComputeRunningProcesses
    room = 64
    while True:
        count, processes = ctypes.c_uint(room), (kind * room)()
        code: int = function(device, ctypes.pointer(count), processes)
        if code != _INSUFFICIENT_SIZE or room >= _MOST_PROCESSES:
            break
        # more processes may start in the meantime
        room = min(_MOST_PROCESSES, max(room, count.value) * 2)
    found = [] if code else [(each.pid, each.used) for each in processes[: count.value]]
    return code, found


# --- nvidia-smi

_GPUS_QUERY = (
    "--query-gpu=index,uuid,name,memory.total,pci.bus_id",
    "--format=csv,noheader,nounits",
)
_HOLDERS_QUERY = ("--query-compute-apps=pid", "--format=csv,noheader,nounits")
_SMI_PATHS = ("/usr/bin", "/usr/local/nvidia/bin", "/usr/lib/wsl/lib")
"""Directories of nvidia-smi if it is not on PATH: Debian, Kubernetes device plugins, WSL."""


class SmiError(Exception):
    """nvidia-smi cannot list the GPUs. The message quotes its output."""


class _Ran(Record):
    """Output (both streams) and exit code of a command."""

    text: str
    code: int


def find_smi(root: str, environ: Mapping[str, str]) -> str | None:
    """Return the path of nvidia-smi, on PATH or in ``_SMI_PATHS``; None if it is not installed."""
    places = [
        *environ.get("PATH", "").split(os.pathsep),
        *(under(root, place) for place in _SMI_PATHS),
    ]
    for place in places:
        path = os.path.join(place, "nvidia-smi")
        if place and os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def read_smi(
    path: str, environ: Mapping[str, str], *, until_s: float
) -> tuple[list[tuple[Gpu, str | None]], list[str]]:
    """Return each GPU with its PCI bus id, and a line for each unusable one.

    ``until_s`` is monotonic time. Raises SmiError if nvidia-smi fails, TimeoutError if it does not
    end in time.
    """
    listed, queried = _run_both(path, environ, until_s)
    gpus, problems = _parse_list(listed)
    details = _parse_query(queried.text) if queried.code == 0 else {}
    found: list[tuple[Gpu, str | None]] = []
    for gpu in gpus:
        memory_mib, bus_id = details.get(gpu.index, (None, None))
        found.append((replace(gpu, memory_mib=memory_mib), bus_id))
    return found, problems


def _parse_list(ran: _Ran) -> tuple[list[Gpu], list[str]]:
    """Return the GPUs in the output of ``nvidia-smi -L``, and its other lines.

    A GPU's line is followed by one for each MIG slice. Raises SmiError if no GPU is listed and the
    error is another than "no devices".
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
    if not gpus and (others or ran.code not in {0, 6}):  # 6 is the exit code for "no devices"
        raise SmiError(f"{' '.join(others)[:300] or 'nothing'} (nvidia-smi, exit code {ran.code})")
    return gpus, others


def _parse_query(text: str) -> dict[int, tuple[int | None, str | None]]:
    """Return index -> (memory in MiB, bus id) from ``--query-gpu`` rows. The memory may be
    ``[N/A]``."""
    rows: dict[int, tuple[int | None, str | None]] = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        index = parse_int(fields[0])
        if len(fields) >= 5 and index is not None:
            rows[index] = (parse_int(fields[-2]), fields[-1])
    return rows


def _run_both(path: str, environ: Mapping[str, str], until_s: float) -> tuple[_Ran, _Ran]:
    """Run ``nvidia-smi -L`` and the query of details at the same time, because each takes long to
    start the driver.

    Raises SmiError, or TimeoutError at ``until_s``.
    """
    import subprocess

    processes: list[subprocess.Popen[bytes]] = []
    try:
        for arguments in (("-L",), _GPUS_QUERY):
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
            _Ran(text=output.decode(errors="replace"), code=process.returncode)
            for process in processes
            for output in (process.communicate(timeout=max(0.0, until_s - time.monotonic()))[0],)
        )
    except subprocess.TimeoutExpired as exc:
        raise TimeoutError from exc
    except OSError as exc:
        raise SmiError(f"{path} cannot be run: {exc.strerror}") from exc
    else:
        return first, second
    finally:
        for process in processes:
            end_process(process)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Kill the process if it still runs. A process stuck in the driver is abandoned."""
    import subprocess

    if process.poll() is None:
        process.kill()
        try:
            process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            process.returncode = -9  # prevents a warning by Popen's destructor
    if process.stdout is not None:
        process.stdout.close()


def _smi_holders(path: str, environ: Mapping[str, str], until_s: float) -> set[int] | None:
    import subprocess

    try:
        ran = subprocess.run(
            [path, *_HOLDERS_QUERY],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=max(0.0, until_s - time.monotonic()),
            check=False,
            env={**environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if ran.returncode != 0:
        return None
    return {int(word) for word in ran.stdout.decode(errors="replace").split() if word.isdigit()}
