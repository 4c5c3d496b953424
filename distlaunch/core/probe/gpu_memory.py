"""Which processes still hold memory on this node's NVIDIA GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping

from distlaunch.core.probe.smi import find_smi

_QUERY = ("--query-compute-apps=pid", "--format=csv,noheader,nounits")
_ASK_S = 5.0
_STEP_S = 0.2


def await_release(pids: Collection[int], *, bound_s: float, environ: Mapping[str, str]) -> tuple[int, ...]:
    """Wait until the driver has taken back the memory of these ended processes; give those that still hold some.

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
            [path, *_QUERY], stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_S, check=False,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return set()
    if ran.returncode != 0:
        return set()
    return {int(word) for word in ran.stdout.decode(errors="replace").split() if word.isdigit()}
