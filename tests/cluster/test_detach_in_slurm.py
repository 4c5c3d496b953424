"""``train --detach`` in a batch script, and in the shell of salloc, of a real Slurm."""

from __future__ import annotations

import shlex
import sys

import pytest

from tests.cluster.slurm_jobs import ROOT
from tests.facts import mentions

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.parametrize("slurm", ["cgroup"], indirect=True, scope="session"),
]
COMMAND = shlex.join([sys.executable, "-m", "distlaunch"])
TRAIN = f"{COMMAND} train --detach --procs-per-node 1 --device cpu --no-python sleep 2"


def variables(slurm) -> dict[str, str]:
    return {"XDG_STATE_HOME": f"{slurm.work}/detach", "PYTHONPATH": str(ROOT)}


def test_a_batch_script_is_refused(slurm):
    ended = slurm.sbatch(TRAIN, "-N2", **variables(slurm))
    assert (ended.state, ended.exit_code) == ("FAILED", "2:0")
    assert mentions(ended.output, "error", "Slurm", "script")
    assert "--detach" in ended.output


def test_in_the_shell_of_salloc_the_job_goes_on_and_a_warning_names_its_end(slurm):
    script = f"name=$({TRAIN} 2>said); echo started $?; {COMMAND} wait $name; echo $?; cat said\n"
    shown = slurm.salloc(script, "-N2", **variables(slurm))
    assert shown.splitlines()[:2] == ["started 0", "0"]
    assert mentions(shown, "warning", "ends with Slurm job")
