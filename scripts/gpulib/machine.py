"""Which GPU the checks run on, as nvidia-smi and torch see it, without distlaunch's own probe."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

ASK_S = 60.0
"""A driver without persistence takes seconds to answer, and so does the first import of torch on a
cold disk."""

_FIELDS = ("index", "uuid", "name", "memory.total", "driver_version")
_TORCH = """
import json, torch
there = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "count": torch.cuda.device_count() if there else 0,
    "uuid": str(torch.cuda.get_device_properties(0).uuid) if there else None,
}))
"""
_FORWARDED = ("PATH", "LANG", "LD_LIBRARY_PATH", "TMPDIR", "VIRTUAL_ENV", "CONDA_PREFIX")
_FORWARDED_PREFIXES = ("CUDA_", "NVIDIA_", "NCCL_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The GPU that jobs get when they ask for one."""

    index: int
    """nvidia-smi's, which is PCI order."""
    uuid: str
    name: str
    memory_mib: int | None
    """None where nvidia-smi knows of no memory of its own."""
    driver: str
    visible: int
    """How many GPUs torch sees here."""
    torch: str
    cuda: str

    def __str__(self) -> str:
        memory = "" if self.memory_mib is None else f", {self.memory_mib:,} MiB"
        return (
            f"GPU {self.index}: {self.name}{memory}, {self.uuid}, driver {self.driver}; torch "
            f"{self.torch}"
        )


class NoGpuError(Exception):
    """There is no GPU to check with; the message says why."""


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Keep of the environment what programs, libraries and the driver need: no scheduler's, no
    launcher's variables."""
    kept = {
        name: value
        for name, value in environ.items()
        if name in _FORWARDED or name.startswith(_FORWARDED_PREFIXES)
    }
    return {"PATH": os.defpath, "LANG": "C.UTF-8", **kept}


def find_gpu(environ: Mapping[str, str]) -> Gpu:
    """Find the first GPU that torch sees among those that nvidia-smi lists. Raises NoGpuError."""
    listed = _listed(environ)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH],
            env={
                **forwarded(environ),
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                "PYTHONPATH": environ.get("PYTHONPATH", ""),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise NoGpuError(f"torch did not answer within {ASK_S:g} s") from exc
    if done.returncode != 0:
        raise NoGpuError(
            f"torch does not work here: {_last_line(done.stderr) or f'exit code {done.returncode}'}"
        )
    found = json.loads(done.stdout.splitlines()[-1])
    if found["cuda"] is None:
        raise NoGpuError(f"torch {found['torch']} is built without CUDA")
    if not found["count"]:
        mask = environ.get("CUDA_VISIBLE_DEVICES")
        within = "" if mask is None else f" (CUDA_VISIBLE_DEVICES={mask})"
        raise NoGpuError(
            f"torch {found['torch']} sees no GPU{within}; nvidia-smi lists {len(listed)}"
        )
    for row in listed:
        if row["uuid"].lower().endswith(found["uuid"].lower()):
            memory = row["memory.total"]
            return Gpu(
                index=int(row["index"]),
                uuid=row["uuid"],
                name=row["name"],
                memory_mib=int(memory) if memory.isdigit() else None,
                driver=row["driver_version"],
                visible=found["count"],
                torch=found["torch"],
                cuda=found["cuda"],
            )
    raise NoGpuError(
        f"torch's first GPU ({found['uuid']}) is none that nvidia-smi lists: a MIG slice?"
    )


def ask_smi(environ: Mapping[str, str], *words: str) -> list[str]:
    """Return the lines of a query, fields with commas between and no units. Raises NoGpuError if it
    gives none."""
    path = shutil.which("nvidia-smi", path=environ.get("PATH", os.defpath))
    if path is None:
        raise NoGpuError("no nvidia-smi on the PATH")
    argv = [path, *words, "--format=csv,noheader,nounits"]
    env = {**forwarded(environ), "LC_ALL": "C"}
    try:
        done = subprocess.run(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise NoGpuError(f"nvidia-smi does not work: {exc}") from exc
    if done.returncode != 0:
        last_output = _last_line(done.stdout) or _last_line(done.stderr) or "nothing"
        raise NoGpuError(f"nvidia-smi ended with {done.returncode}: {last_output}")
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _listed(environ: Mapping[str, str]) -> list[dict[str, str]]:
    rows = []
    for line in ask_smi(environ, f"--query-gpu={','.join(_FIELDS)}"):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == len(_FIELDS) and fields[0].isdigit():
            rows.append(dict(zip(_FIELDS, fields, strict=True)))
    if not rows:
        raise NoGpuError("nvidia-smi lists no GPU")
    return rows


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""
