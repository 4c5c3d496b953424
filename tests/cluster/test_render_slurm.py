"""Rendered batch scripts on a running Slurm: it grants what they ask for, and they train."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "scripts" / "examples" / "digits_ddp.py"
SHOWS = "scontrol show job --details --oneliner $SLURM_JOB_ID; printf '<%s>' \"$@\""
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def render(slurm):
    """Give a function that has the real command write a script into the folder where jobs run."""

    def write(name: str, *words: object) -> Path:
        path = slurm.work / name
        command = [sys.executable, "-m", "distlaunch", "render", "slurm", f"--out={path}", *map(str, words)]
        env = {"PATH": os.defpath, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=60)
        return path

    return write


def program(slurm, folder: str, body: str) -> str:
    """Put a program named distlaunch into a folder of its own; give the PATH that begins with it."""
    where = slurm.work / folder
    where.mkdir(exist_ok=True)
    (where / "distlaunch").write_text(f"#!/bin/sh\n{body}\n")
    (where / "distlaunch").chmod(0o755)
    return f"{where}:{slurm.environment['PATH']}"


def submitted(slurm, script: Path, **variables: str):
    """Submit a script as it is, but for where its output goes, and wait until the job has ended."""
    words = ("sbatch", "--parsable", f"--output={slurm.work}/%j.out", script)
    job_id = int(slurm.run(*map(str, words), **variables))
    return slurm.wait(job_id, timeout_s=180.0)[0]


def test_slurm_grants_what_a_script_asks_for(slurm, render):
    script = render(
        "asks", "--num-nodes=2", "--gpus-per-node=2", "--cpus=8", "--memory=64Mi", "--time=90m", "--max-restarts=2",
        "--name=asks", "train.py", "a b", "$HOME", "it's", "a\nb",
    )  # fmt: skip
    done = submitted(slurm, script, PATH=program(slurm, "shows", SHOWS))
    assert done.state == "COMPLETED", done
    told = dict(re.findall(r"(\w+)=(\S*)", done.output))
    wanted = {
        "JobName": "asks",
        "NumNodes": "2",
        "NumTasks": "2",
        "CPUs/Task": "8",
        "TimeLimit": "01:30:00",
        "Requeue": "1",
    }
    told["CPUs/Task"] = re.findall(r"CPUs/Task=(\d+)", done.output)[0]
    assert {name: told[name] for name in wanted} == wanted
    assert told["MinMemoryNode"] == "64M"
    granted = dict(re.findall(r"\bNodes=(\S+) CPU_IDs=\S+ Mem=\d+ GRES=(\S*)", done.output))
    gpus = {node: sum(map(int, re.findall(r"gpu(?::\w+)?:(\d+)", each))) for node, each in granted.items()}
    assert {node: gpus[nodes] for nodes in gpus for node in slurm.hostnames(nodes)} == {"n1": 2, "n2": 2}
    words = [
        "train",
        "--gpus-per-node=2",
        "--num-nodes=2",
        "--max-restarts=2",
        "train.py",
        "a b",
        "$HOME",
        "it's",
        "a\nb",
    ]
    assert re.findall(r"<([^>]*)>", done.output) == words


@pytest.mark.parametrize(
    ("words", "nodes"),
    [(["--num-nodes=2:8"], 4), (["--num-nodes=1:2", "--spares=1"], 3), (["--num-nodes=2:4", "--cpus=4"], 4)],
)
def test_an_elastic_script_gets_as_many_nodes_as_there_are(slurm, render, words, nodes):
    script = render("elastic", *words, "--gpus-per-node=1", "train.py")
    done = submitted(slurm, script, PATH=program(slurm, "shows", SHOWS))
    assert done.state == "COMPLETED", done
    assert f" NumNodes={nodes} " in done.output


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_script_trains(slurm, render, nodes):
    script = render(f"trains-{nodes}", f"--num-nodes={nodes}", "--procs-per-node=2", "--time=10m", DIGITS, "--epochs=3")
    state = slurm.work / "state"
    runs = f'exec env XDG_STATE_HOME={state} PYTHONPATH={ROOT} OMP_NUM_THREADS=1 {sys.executable} -m distlaunch "$@"'
    done = submitted(slurm, script, PATH=program(slurm, "real", runs))
    assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done
    assert [int(number) for number in re.findall(r"epoch +(\d+)  loss", done.output)] == [0, 1, 2]
