"""Plans and jobs in the environments of schedulers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CAPTURES = Path(__file__).parents[2] / "data" / "slurm"


TRAINER = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}
"""What Kubeflow Trainer v2 sets (its documentation)."""
MPIRUN = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()
}
"""What Open MPI's mpirun sets for the second of two processes on a host (captured, see
test_mpi)."""
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3",
    "SKYPILOT_NODE_RANK": "0",
    "SKYPILOT_NUM_NODES": "3",
}
SAYS = "import os; print('is', *(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'NODE_RANK')))"


def slurm(name: str) -> dict[str, str]:
    """Return the environment of a process of a Slurm job."""
    lines = (CAPTURES / f"{name}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


@pytest.fixture
def plan(distlaunch):
    """Return the plan of a command line, as data."""
    (distlaunch.work / "t.py").write_text(SAYS)

    def make(*words: str, env=None) -> dict:
        result = distlaunch.run(["plan", "--format", "json", *words, "t.py"], env=env)
        assert (result.returncode, result.stderr) == (0, "")
        return json.loads(result.stdout)

    return make


@pytest.fixture
def refused(distlaunch):
    """Return the message for a refused command line: nothing is printed, made or started."""
    (distlaunch.work / "t.py").write_text(SAYS)

    def say(*words: str, env=None, command: str = "plan") -> str:
        result = distlaunch.run([command, *words, "t.py"], env=env)
        assert (result.returncode, result.stdout, result.run_dir) == (2, "", None)
        first, *others = result.stderr.splitlines()
        assert first.startswith("distlaunch: error: ")
        assert all(line.startswith("  hint: ") for line in others)
        assert len(others) <= 1
        return result.stderr

    return say


@pytest.fixture
def train(distlaunch):
    """Run a job whose workers report their ranks. Return the reports, and all other output."""
    (distlaunch.work / "t.py").write_text(SAYS)

    def run(*words: str, env=None) -> tuple[list[str], str]:
        result = distlaunch.train("--format", "plain", *words, "t.py", env=env)
        assert result.returncode == 0, result.stderr
        return sorted(
            line.partition(" is ")[2] for line in result.stdout.splitlines()
        ), result.stderr

    return run
