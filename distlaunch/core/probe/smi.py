"""List NVIDIA GPUs by what ``nvidia-smi`` prints."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from distlaunch.core.model.gpus import Gpu, MigDevice
from distlaunch.core.model.record import Record, replace
from distlaunch.core.probe.files import parse_int, under

if TYPE_CHECKING:
    import subprocess

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
    places = [*environ.get("PATH", "").split(os.pathsep), *(under(root, place) for place in _ELSEWHERE)]
    for place in places:
        path = os.path.join(place, "nvidia-smi")
        if place and os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def read_smi(
    path: str, environ: Mapping[str, str], *, deadline_s: float
) -> tuple[list[tuple[Gpu, str | None]], list[str]]:
    """Return each GPU with its PCI bus id, and a line for each that cannot be used.

    ``deadline_s`` is monotonic time. Raises SmiError if the tool fails, TimeoutError if it does not end in time.
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
            gpus[-1] = replace(gpus[-1], mig=(*gpus[-1].mig, MigDevice(uuid=uuid, profile=words[1])))
        elif line.strip() and not line.lower().startswith(("no devices", "nvml library version")):
            others.append(line.strip())
    if not gpus and (others or ran.code not in {0, 6}):  # 6: the tool's own code for "no devices"
        raise SmiError(f"{' '.join(others)[:300] or 'nothing'} (nvidia-smi, exit code {ran.code})")
    return gpus, others


def parse_query(text: str) -> dict[int, tuple[int | None, str | None]]:
    """Read the ``--query-gpu`` rows: memory in MiB (None where the tool has ``[N/A]``) and bus id by index."""
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
