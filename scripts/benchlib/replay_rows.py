"""Measurements of the coordinator's core at the largest size: `scripts/bench replay`."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile

from .launchers import WORKERS, Launcher
from .process import BenchError
from .rows import Measurement, Row, Sample, Scale

NODES, WORKERS_EACH = 16_384, 8
SMALLER = 4


def _replayed(launcher: Launcher, nodes: int) -> dict[str, float]:
    """Replay one job in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="distlaunch-bench-") as directory:
        with open(os.path.join(directory, "train.py"), "w", encoding="utf-8"):
            pass
        argv = [
            f"{launcher.bin}/python",
            os.path.join(WORKERS, "replay.py"),
            str(nodes),
            str(WORKERS_EACH),
        ]
        done = subprocess.run(
            argv, cwd=directory, capture_output=True, text=True, check=False, timeout=300
        )
    if done.returncode:
        raise BenchError(done.stderr[-1500:])
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def replay(launcher: Launcher, scale: Scale) -> Sample:
    whole, part = _replayed(launcher, NODES), _replayed(launcher, NODES // SMALLER)
    return {**whole, "replay_growth": whole["replay"] / part["replay"]}


REPLAY = (
    Measurement(
        name="replay",
        run=replay,
        launchers=("distlaunch",),
        rows=(
            Row(
                key="replay",
                title="16,384 nodes x 8 workers: start, one failure, stop, restart, end: the "
                "policy with its plans",
                unit="s",
                goal="< 5 s",
                reached=lambda row: row["distlaunch"] < 5,
            ),
            Row(
                key="replay_memory",
                title="largest memory of that",
                unit="MB",
                goal="< 600 MB",
                reached=lambda row: row["distlaunch"] < 600,
            ),
            Row(
                key="replay_growth",
                title="its time beside that of a quarter of the nodes (n log n: 4.7)",
                unit="x",
                goal="< 5.5 x",
                reached=lambda row: row["distlaunch"] < 5.5,
            ),
        ),
    ),
)
