"""``top`` and ``stack`` of a job in a batch script of a real Slurm."""

from __future__ import annotations

import json
import sys

import pytest

from tests.cluster import slurm_jobs
from tests.cluster.slurm_jobs import ROOT

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.parametrize("slurm", ["cgroup"], indirect=True, scope="session"),
]


def test_the_agents_of_a_step_answer(slurm):
    job = slurm_jobs.Job(slurm, "-N2 -w n1,n2", train="--job-id shown")
    reports = job.up(2)
    command = [sys.executable, "-m", "distlaunch"]
    variables = {"XDG_STATE_HOME": f"{slurm.work}/state", "PYTHONPATH": str(ROOT)}

    def ask(*words: str):
        return json.loads(slurm.run(*command, *words, "--format", "json", **variables))

    view = ask("top", "shown")
    assert [(row["rank"], row["host"]) for row in view["ranks"]] == [(0, "n1"), (1, "n2")]
    assert view["unanswered"] == []
    assert all(row["rss_bytes"] for row in view["ranks"])
    stack = ask("stack", "shown")
    [group] = stack["groups"]
    assert (group["ranks"], stack["unanswered"]) == ([0, 1], [])
    assert "logs_signals.py" in group["frame"]
    assert len(reports) == 2
    job.enough()
    done = job.wait()
    assert done.state == "COMPLETED", done.output
