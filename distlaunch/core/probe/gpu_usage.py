"""Ask the NVIDIA driver how busy each GPU is, and which processes hold how much of its memory.

A driver may hang, so a child process asks it. The child keeps NVML open between questions, because
opening it takes long, and ends by itself when no question comes any more. If NVML is missing, the
child runs nvidia-smi.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distlaunch.core.model.record import Record
from distlaunch.core.probe import nvidia
from distlaunch.core.probe.files import parse_int, under

if TYPE_CHECKING:
    import subprocess

_IDLE_S = 60.0
"""The child ends when no question has come for this long."""
_AGAIN_S = 30.0
"""How long the driver is not asked again after it has not answered in time."""
_SMI_S = 4.0
_SMI_PERIOD_S = 5.0
"""Shortest time between two runs of nvidia-smi, which takes a good part of a second."""
_LENGTH_BYTES = 4
_MOST_BYTES = 4 << 20
_UNKNOWN = (1 << 64) - 1
"""NVML's value for memory that the driver does not tell (NVML_VALUE_NOT_AVAILABLE)."""
_DRIVERS = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")
"""Files that show that the NVIDIA driver is loaded. The last one is WSL's."""


class GpuUse(Record):
    """One GPU, or a GPU in MIG mode with all its slices."""

    index: int
    uuids: tuple[str, ...]
    """Of the GPU and of its MIG slices."""
    percent: float | None
    """Share of the last moments in which the GPU computed. None in MIG mode."""
    used_bytes: int | None
    processes: Mapping[int, int | None]
    """pid -> bytes of memory; None if the driver does not say."""

    def has_any(self, pids: Iterable[int]) -> bool:
        """Return whether one of these processes uses the GPU."""
        return any(pid in self.processes for pid in pids)


class GpuMeter:
    """Asks the driver, in a child process that lives from question to question."""

    def __init__(self, root: str, environ: Mapping[str, str]) -> None:
        self._libraries = nvidia.nvml_libraries(root)
        self._smi = nvidia.find_smi(root, environ) or ""
        self._is_there = any(os.path.exists(under(root, path)) for path in _DRIVERS)
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._not_before = 0.0

    def read(self, *, until_s: float) -> list[GpuUse] | None:
        """Return the GPUs; None if there is no driver, or if it does not answer until ``until_s``
        (monotonic). In that case it is not asked again for 30 s."""
        if not self._is_there or time.monotonic() < self._not_before:
            return None
        rows = self._ask_child(until_s)
        if rows is None:
            self._end_child()
            self._not_before = time.monotonic() + _AGAIN_S
            return None
        return [_from_row(row) for row in rows]

    def _ask_child(self, until_s: float) -> list[Any] | None:
        for _ in range(2):  # the child may have ended, because no question had come for long
            child = self._ensure_child()
            if child is None or child.stdin is None or child.stdout is None:
                return None
            try:
                os.write(child.stdin.fileno(), b"?")
                return _read_answer(child.stdout.fileno(), until_s)
            except (BrokenPipeError, EOFError):
                self._end_child()
            except (OSError, TimeoutError, ValueError, TypeError):
                return None
        return None

    def _ensure_child(self) -> subprocess.Popen[bytes] | None:
        import subprocess

        with self._lock:
            if self._child is None and not self._is_closed:
                package = nvidia.package_path()
                command = [sys.executable, "-I", "-S", "-c", _PROGRAM]
                with suppress(OSError, ValueError):
                    self._child = subprocess.Popen(
                        [*command, package, self._smi, *self._libraries],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL,
                        bufsize=0,
                        start_new_session=True,
                    )
            return self._child

    def _end_child(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            if child.stdin is not None:
                child.stdin.close()
            nvidia.end_process(child)

    def close(self) -> None:
        """End the child. Later calls of ``read`` return None."""
        with self._lock:
            self._is_closed = True
        self._end_child()


def _read_answer(descriptor: int, until_s: float) -> list[Any]:
    """Return the rows of the child's answer.

    Raises TimeoutError, EOFError if the child has ended, or ValueError for something else.
    """
    import marshal

    data = b""
    size = _LENGTH_BYTES
    while len(data) < size:
        left_s = until_s - time.monotonic()
        if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
            raise TimeoutError
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            raise EOFError
        data += chunk
        if size == _LENGTH_BYTES and len(data) >= size:
            size += int.from_bytes(data[:_LENGTH_BYTES], "big")
            if size > _MOST_BYTES:
                raise ValueError(size)
    rows = marshal.loads(data[_LENGTH_BYTES:])  # noqa: S302 - written by our own program
    if not isinstance(rows, list):
        raise ValueError  # noqa: TRY004 - the same as any other wrong answer
    return rows


def _from_row(row: tuple[Any, ...]) -> GpuUse:
    index, uuids, percent, used_bytes, processes = row
    return GpuUse(
        index=index,
        uuids=tuple(uuids),
        percent=percent,
        used_bytes=used_bytes,
        processes=dict(processes),
    )


# --- the child

_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from distlaunch.core.probe.gpu_usage import serve
serve(sys.argv[2], sys.argv[3:])
"""


def serve(smi: str, libraries: Sequence[str]) -> None:
    """Answer questions on stdin until its end, or until none has come for a while.

    A question is one byte. An answer is its length and a list of rows, which is empty if there is
    no driver.
    """
    import marshal

    answer = _Nvml(libraries).rows if nvidia.load_nvml(libraries) else _Smi(smi).rows
    while select.select([0], [], [], _IDLE_S)[0] and os.read(0, 4096):
        data = marshal.dumps(answer())
        data = len(data).to_bytes(_LENGTH_BYTES, "big") + data
        while data:
            data = data[os.write(1, data) :]


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Nvml:
    """NVML, opened at the first question and then kept open."""

    def __init__(self, libraries: Sequence[str]) -> None:
        self._lib = nvidia.load_nvml(libraries)
        self._session: nvidia.NvmlSession | None = None

    def rows(self) -> list[tuple[Any, ...]]:
        lib = self._lib
        if lib is None:
            return []
        try:
            if self._session is None:
                session = nvidia.NvmlSession(lib)
                session.__enter__()
                self._session = session
            return [_nvml_row(lib, *each) for each in nvidia.each_device(lib)]
        except (nvidia.NvmlError, AttributeError):
            return []


def _nvml_row(
    lib: nvidia.NvmlLibrary, index: int, device: ctypes.c_void_p, slices: list[ctypes.c_void_p]
) -> tuple[Any, ...]:
    rates, memory = _Utilization(), nvidia.NvmlMemory()
    percent = used = None
    with suppress(AttributeError):
        if not lib.nvmlDeviceGetUtilizationRates(device, ctypes.pointer(rates)):
            percent = float(rates.gpu)
    if not lib.nvmlDeviceGetMemoryInfo(device, ctypes.pointer(memory)):
        used = memory.used
    processes: dict[int, int | None] = {}
    for each in (device, *slices):
        _, found = nvidia.compute_processes(lib, each)
        for pid, size in found:
            before = processes.get(pid)
            known = None if size == _UNKNOWN else size
            processes[pid] = known if before is None or known is None else before + known
    uuids = [nvidia.device_text(lib.nvmlDeviceGetUUID, each) for each in (device, *slices)]
    return index, uuids, percent, used, list(processes.items())


class _Smi:
    """nvidia-smi, which is run again only after some seconds."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._read_at = float("-inf")
        self._rows: list[tuple[Any, ...]] = []

    def rows(self) -> list[tuple[Any, ...]]:
        if self._path and time.monotonic() >= self._read_at + _SMI_PERIOD_S:
            self._read_at = time.monotonic()
            self._rows = _smi_rows(self._path)
        return self._rows


def _smi_rows(path: str) -> list[tuple[Any, ...]]:
    gpus = _smi_query(path, "--query-gpu=index,uuid,utilization.gpu,memory.used")
    processes = _smi_query(path, "--query-compute-apps=pid,gpu_uuid,used_memory")
    rows: list[tuple[Any, ...]] = []
    for fields in gpus:
        if len(fields) != 4 or (index := parse_int(fields[0])) is None:
            continue
        percent, used = parse_int(fields[2]), parse_int(fields[3])
        held = [
            (int(row[0]), None if (size := parse_int(row[2])) is None else size << 20)
            for row in processes
            if len(row) == 3 and row[1] == fields[1] and row[0].isdigit()
        ]
        rows.append(
            (
                index,
                [fields[1]],
                None if percent is None else float(percent),
                None if used is None else used << 20,
                held,
            )
        )
    return rows


def _smi_query(path: str, query: str) -> list[list[str]]:
    import subprocess

    try:
        ran = subprocess.run(
            [path, query, "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SMI_S,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError):
        return []
    if ran.returncode:
        return []
    lines = ran.stdout.decode(errors="replace").splitlines()
    return [[field.strip() for field in line.split(",")] for line in lines if line.strip()]
