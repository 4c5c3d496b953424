"""Count what arrived of the workers' lines, on the console and in log files."""

from __future__ import annotations

import os
import re


def count_lines(output: bytes) -> tuple[int, int]:
    """Return how many of the workers' lines arrived, and how many of those in one piece.

    A line that the launcher folded for both ranks counts twice. Torn lines are those with something
    written into them.
    """
    whole = re.compile(rb"(\[0[-,]1\])?[^<\n]*(?:<stdout>:?)?[^<\n]*<r(?:r|\d+)> \d{8} x{115}\r?")
    intact = folded = 0
    for line in output.split(b"\n"):
        if found := whole.fullmatch(line):
            intact += 2 if found.group(1) else 1
            folded += 1 if found.group(1) else 0
    # No prefix of any launcher has an x in it: what is torn still counts as having arrived.
    return output.count(b"x") // 115 + folded, intact


def log_bytes(directory: str) -> int:
    """Return how much the launcher's log files hold (as much as wanted where it was asked for
    none)."""
    logs = f"{directory}/logs"
    if not os.path.isdir(logs):
        return 1 << 62
    total = 0
    for parent, _, names in os.walk(logs):
        for name in names:
            if name.endswith(".log") and not os.path.islink(f"{parent}/{name}"):
                total += os.path.getsize(f"{parent}/{name}")
    return total
