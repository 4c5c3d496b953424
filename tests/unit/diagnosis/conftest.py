from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from distlaunch.core.model.worker_exit import WorkerExit

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def judge_score():
    """Return the scoring of scripts/explain-scores."""
    return runpy.run_path(str(HERE.parents[2] / "scripts" / "explain-scores"))["judge"]


@pytest.fixture
def end_of():
    """Return a WorkerExit with these fields, and defaults for the others."""

    def build(rank: int = 0, tail: str | bytes = b"", **fields) -> WorkerExit:
        data = tail.encode() if isinstance(tail, str) else tail
        defaults = {
            "local_rank": rank,
            "host": "node1",
            "pid": 100 + rank,
            "returncode": 1,
            "ended_s": 5.0,
            "uptime_s": 5.0,
            "told_to_stop": False,
        }
        return WorkerExit(rank=rank, stderr_tail=data, **(defaults | fields))

    return build


def _text_of(recorded: str | None) -> str | None:
    return recorded.encode("latin-1").decode("utf-8", "replace") if recorded else None


@pytest.fixture
def recorded(end_of):
    """Load the recorded ends of a program of tests/programs/failures."""

    def load(program: str) -> list[WorkerExit]:
        text = (HERE / "recorded" / f"{program}.json").read_text(encoding="utf-8")
        return [
            end_of(
                end["rank"],
                end["stderr_tail"].encode("latin-1"),
                returncode=end["returncode"],
                ended_s=end["ended_s"],
                uptime_s=end["ended_s"],
                told_to_stop=end["told_to_stop"],
                stdout_tail=_text_of(end.get("stdout_tail")) or "",
                traceback_age_s=end.get("traceback_age_s"),
                error_file=_text_of(end["error_file"]),
            )
            for end in json.loads(text)
        ]

    return load
