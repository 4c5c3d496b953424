"""``train`` where a system is around us that says too little: it never trains alone without a
word."""

from __future__ import annotations

import pytest

from tests.facts import mentions


@pytest.mark.parametrize(
    "environ",
    [
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
        {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "4", "SLURM_NODEID": "2"},
        {
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "job-master-0",
        },
    ],
    ids=["mpirun", "slurm", "pod"],
)
def test_one_launcher_of_several_does_not_train_alone_unless_asked_to(distlaunch, environ):
    (distlaunch.work / "t.py").write_text("print('trained')")
    refused = distlaunch.run(["train", "--num-procs", "1", "t.py"], env=environ)
    assert (refused.returncode, refused.stdout, refused.run_dir) == (2, "", None)
    assert mentions(refused.stderr, "several launchers")
    alone = distlaunch.run(["train", "--num-procs", "1", "--source", "flags", "t.py"], env=environ)
    assert (alone.returncode, "trained" in alone.stdout) == (0, True)


def test_a_system_that_is_not_used_is_reported(distlaunch):
    (distlaunch.work / "t.py").write_text("print('trained')")
    reported = distlaunch.run(["train", "--num-procs", "1", "t.py"], env={"LSB_JOBID": "7"})
    assert (reported.returncode, "trained" in reported.stdout) == (0, True)
    assert mentions(reported.stderr, "lsf", "not used", "LSB_JOBID='7'", "LSB_DJOB_HOSTFILE")
