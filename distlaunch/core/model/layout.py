"""Layer core.model: the files of a run directory, by name. Pure."""

from __future__ import annotations

import os.path

EVENTS = "events.jsonl"
REPORT = "report.txt"
MARKER = ".distlaunch-run"
"""Says that a folder is a run directory: without it none is ever removed."""


def plan_path(run_dir: str, attempt: int) -> str:
    """Name the file of an attempt's plan."""
    return os.path.join(run_dir, f"plan-{attempt}.json")


def attempt_dir(run_dir: str, attempt: int) -> str:
    """Name the folder of one attempt's files."""
    return os.path.join(run_dir, f"attempt-{attempt}")


def log_path(run_dir: str, attempt: int, rank: int) -> str:
    """Name the file of a rank's output, stdout and stderr in the order of their coming."""
    return os.path.join(attempt_dir(run_dir, attempt), f"rank-{rank}.log")


def error_file(run_dir: str, attempt: int, rank: int) -> str:
    """Name the file that torch's ``@record`` writes a worker's exception to."""
    return os.path.join(attempt_dir(run_dir, attempt), f"rank-{rank}.error.json")


def is_ours(name: str) -> bool:
    """Tell whether a file of a run directory, or of one of its attempts, was made by distlaunch, by its name."""
    return name in (EVENTS, REPORT, MARKER) or (
        name.startswith(("plan-", "rank-")) and name.endswith((".json", ".log"))
    )
