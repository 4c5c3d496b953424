"""Rendered batch scripts on a running Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.slurm_jobs import until

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "scripts" / "examples" / "digits_ddp.py"
SHOWS = "scontrol show job --details --oneliner $SLURM_JOB_ID; printf '<%s>' \"$@\""
# A script is the same under every tracker.
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.parametrize("slurm", ["cgroup"], indirect=True, scope="session"),
]


@pytest.fixture(scope="module")
def render(slurm):
    """Return a function that makes the real command write a script into the folder where jobs
    run."""

    def write(name: str, *words: object) -> Path:
        path = slurm.work / name
        command = [
            sys.executable,
            "-m",
            "distlaunch",
            "render",
            "slurm",
            f"--out={path}",
            "--force",
            *map(str, words),
        ]
        env = {"PATH": os.defpath, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=60)
        return path

    return write


def program(slurm, folder: str, body: str) -> str:
    """Put a program named distlaunch into a folder of its own. Return the PATH that begins with
    it."""
    where = slurm.work / folder
    where.mkdir(exist_ok=True)
    (where / "distlaunch").write_text(f"#!/bin/sh\n{body}\n")
    (where / "distlaunch").chmod(0o755)
    return f"{where}:{slurm.environment['PATH']}"


def real(slurm) -> str:
    """Return the body of a program that is the real distlaunch."""
    state = slurm.work / "state"
    return f'exec env XDG_STATE_HOME={state} PYTHONPATH={ROOT} OMP_NUM_THREADS=1 {sys.executable} -m distlaunch "$@"'


def submitted(slurm, script: Path, **variables: str):
    """Submit a script, with another output file, and wait until the job has ended."""
    words = ("sbatch", "--parsable", f"--output={slurm.work}/%j.out", script)
    job_id = int(slurm.run(*map(str, words), **variables))
    return slurm.wait(job_id, timeout_s=180.0)[0]


def test_slurm_grants_what_a_script_asks_for(slurm, render):
    script = render(
        "asks",
        "--num-nodes=2",
        "--gpus-per-node=2",
        "--cpus=8",
        "--memory=64Mi",
        "--time=90m",
        "--max-restarts=2",
        "--name=asks",
        "train.py",
        "a b",
        "$HOME",
        "it's",
        "a\nb",
    )
    done = submitted(slurm, script, PATH=program(slurm, "shows", SHOWS))
    assert done.state == "COMPLETED", done
    reported = dict(re.findall(r"(\w+)=(\S*)", done.output))
    wanted = {
        "JobName": "asks",
        "NumNodes": "2",
        "NumTasks": "2",
        "CPUs/Task": "8",
        "TimeLimit": "01:30:00",
        "Requeue": "1",
    }
    reported["CPUs/Task"] = re.findall(r"CPUs/Task=(\d+)", done.output)[0]
    assert {name: reported[name] for name in wanted} == wanted
    assert reported["MinMemoryNode"] == "64M"
    granted = dict(re.findall(r"\bNodes=(\S+) CPU_IDs=\S+ Mem=\d+ GRES=(\S*)", done.output))
    gpus = {
        node: sum(map(int, re.findall(r"gpu(?::\w+)?:(\d+)", each)))
        for node, each in granted.items()
    }
    assert {node: gpus[nodes] for nodes in gpus for node in slurm.hostnames(nodes)} == {
        "n1": 2,
        "n2": 2,
    }
    words = [
        "train",
        "--gpus-per-node=2",
        "--num-nodes=2",
        "--max-restarts=2",
        "--requeue",
        "train.py",
        "a b",
        "$HOME",
        "it's",
        "a\nb",
    ]
    assert re.findall(r"<([^>]*)>", done.output) == words


def test_workers_have_all_cpus_of_their_nodes_unless_a_number_is_reported(slurm, render):
    for name, words, cpus in (("whole", [], "0-63"), ("part", ["--cpus=8"], "0-7")):
        script = render(name, *words, "--num-nodes=2", "--procs-per-node=8", "train.py")
        done = submitted(slurm, script, PATH=program(slurm, "shows", SHOWS))
        assert re.findall(r"\bCPU_IDs=(\S+)", done.output) == [cpus], done


def test_a_script_goes_on_in_another_turn_when_its_time_is_nearly_up(slurm, render):
    (slurm.work / "turns.py").write_text(
        "import os, signal, sys\n"
        "turn = os.environ['DISTLAUNCH_ATTEMPT']\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\n"
        "print('turn', turn, os.environ['DISTLAUNCH_JOB_ID'], flush=True)\n"
        "if turn == '0':\n"
        "    signal.pause()\n"
    )
    script = render("turns", "--procs-per-node=1", "turns.py")
    path = program(slurm, "real", real(slurm))
    job_id = int(
        slurm.run("sbatch", "--parsable", f"--output={slurm.work}/%j.out", str(script), PATH=path)
    )
    output = slurm.work / f"{job_id}.out"

    def fields() -> dict[str, str]:
        line = slurm.run("scontrol", "--oneliner", "show", "job", str(job_id))
        return dict(word.partition("=")[::2] for word in line.split())

    until(lambda: output.exists() and f"turn 0 {job_id}\n" in output.read_text(), "the first turn")
    slurm.run(
        "scancel", "--batch", "--signal=USR1", str(job_id)
    )  # as Slurm does before the time limit
    until(lambda: fields()["Restarts"] == "1" and fields()["JobState"] == "PENDING", "another turn")
    slurm.run("scontrol", "update", f"JobId={job_id}", "StartTime=now+2")
    done = slurm.wait(job_id, timeout_s=120.0)[0]
    assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done
    assert re.findall(r"turn \d \S+", done.output) == [f"turn 0 {job_id}", f"turn 1 {job_id}-r1"]


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        (["--num-nodes=2:8"], 4),
        (["--num-nodes=1:2", "--spares=1"], 3),
        (["--num-nodes=2:4", "--cpus=4"], 4),
    ],
)
def test_an_elastic_script_gets_as_many_nodes_as_there_are(slurm, render, words, nodes):
    script = render("elastic", *words, "--gpus-per-node=1", "train.py")
    done = submitted(slurm, script, PATH=program(slurm, "shows", SHOWS))
    assert done.state == "COMPLETED", done
    assert f" NumNodes={nodes} " in done.output


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_script_trains(slurm, render, nodes):
    script = render(
        f"trains-{nodes}",
        f"--num-nodes={nodes}",
        "--procs-per-node=2",
        "--time=10m",
        DIGITS,
        "--epochs=3",
    )
    done = submitted(slurm, script, PATH=program(slurm, "real", real(slurm)))
    assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done
    assert [int(number) for number in re.findall(r"epoch +(\d+)  loss", done.output)] == [0, 1, 2]
