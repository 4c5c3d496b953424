"""Jobs that write, and their output."""

from __future__ import annotations

import re
from pathlib import Path

from tests.launcher import PROGRAMS

BYTES, LINES = PROGRAMS / "output_bytes.py", PROGRAMS / "output_lines.py"
LONG_LINE, FLOOD, DISK = (PROGRAMS / f"output_{name}.py" for name in ("long_line", "flood", "disk"))
PEAK_KB = 32 << 10


def script(distlaunch, source: str) -> Path:
    path = distlaunch.work / "worker.py"
    path.write_text(f"import os, sys, time\nRANK = int(os.environ['RANK'])\n{source}")
    return path


def log_of(result, rank: int, attempt: int = 0) -> bytes:
    return (result.run_dir / f"attempt-{attempt}" / f"rank-{rank}.log").read_bytes()


def unfolded(output: bytes) -> dict[int, list[bytes]]:
    """Split console lines by the ranks of their prefixes."""
    found: dict[int, list[bytes]] = {}
    for line in output.splitlines():
        match = re.fullmatch(rb"\[([\d,-]+)\] (.*)", line)
        assert match, line
        for part in match[1].split(b","):
            first, _, last = part.partition(b"-")
            for rank in range(int(first), int(last or first) + 1):
                found.setdefault(rank, []).append(match[2])
    return found


def numbered(rank: int, count: int, width: int) -> list[bytes]:
    return [b"%d %d " % (rank, number) + b"x" * width for number in range(count)]
