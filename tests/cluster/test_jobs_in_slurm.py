"""``ps``, ``status``, ``logs`` and ``stop`` of a job in a batch script of a real Slurm."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys

import pytest

from tests.cluster import slurm_jobs
from tests.cluster.slurm_jobs import ROOT

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.parametrize("slurm", ["cgroup"], indirect=True, scope="session"),
]


def test_a_job_in_a_batch_script_is_seen_and_stopped_by_srun(slurm):
    job = slurm_jobs.Job(slurm, "-N2 -w n1,n2", train="--job-id exp")
    job.up(2)
    command = [sys.executable, "-m", "distlaunch"]
    variables = {"XDG_STATE_HOME": f"{slurm.work}/state", "PYTHONPATH": str(ROOT)}

    def ask(*words: str):
        return json.loads(slurm.run(*command, *words, "--format", "json", **variables))

    [listed] = ask("ps")
    assert (listed["state"], listed["world_size"]) == ("running", 2)
    status = ask("status", "exp")
    assert [each["returncode"] for each in status["workers"]] == [None, None]
    assert status["hosts"] == "n[1-2]"
    run_dir = status["run_dir"]

    # As on a host of another name, which shares the directory.
    path = os.path.join(run_dir, "events.jsonl")
    with open(path) as file:
        started = json.loads(file.readline())
    assert started["slurm"] == {"job": str(job.id), "node": "n1"}
    far = os.path.join(slurm.work, "far")
    os.mkdir(far, 0o700)
    with open(os.path.join(far, "events.jsonl"), "w") as file:
        json.dump({**started, "host": "far.example"}, file)
        file.write("\n")
    with open(os.path.join(far, ".distlaunch-run"), "w") as file:
        file.write("far")
    asked = f"-m distlaunch stop {far}"
    refused = slurm.run(
        "sh", "-c", f"{shlex.quote(sys.executable)} {asked} 2>&1; echo $?", **variables
    )
    assert refused.splitlines()[-1] == "2"
    [hint] = [line for line in refused.splitlines() if "srun" in line]
    words = shlex.split(hint.partition("hint:")[2])

    # The line works on the real job.
    at = words.index("distlaunch")
    slurm.run(*words[:at], *command, "stop", run_dir, **variables)
    done = job.wait()
    assert (done.state, done.exit_code) == ("FAILED", f"{128 + signal.SIGTERM}:0"), done.output
    assert ask("status", "exp")["state"] == "stopped"
