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
from tests.launcher import PROGRAMS

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


def test_logs_that_are_on_the_nodes_of_a_running_job_are_read_from_them(slurm):
    here = slurm.work / "node-logs"
    here.mkdir()
    variables = {"XDG_STATE_HOME": f"{slurm.work}/state", "PYTHONPATH": str(ROOT)}
    exports = " ".join(f"{name}={value}" for name, value in variables.items())
    train = f"train --job-id far --procs-per-node 1 --device cpu --node-logs {here}/$SLURM_JOB_ID"
    job = slurm.submit(
        f"cd {here}\nexport {exports}\n"
        f"exec {sys.executable} -m distlaunch {train} {PROGRAMS}/prints_and_waits.py 2 0\n",
        *("-N2", "-w", "n1,n2"),
    )

    slurm_jobs.until(lambda: len(list(here.glob("printed-0-*"))) == 2, "workers")
    asked = (sys.executable, "-m", "distlaunch", "logs", "far", "--format", "json")
    shown = [json.loads(line) for line in slurm.run(*asked, **variables).splitlines()]
    assert sorted((each["rank"], each["text"]) for each in shown) == [
        (rank, f"attempt 0 rank {rank} line {number}") for rank in (0, 1) for number in (0, 1)
    ]
    (here / "go").touch()
    [finished] = slurm.wait(job)
    assert finished.exit_code == "0:0"
