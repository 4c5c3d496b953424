from __future__ import annotations

import pytest

from distlaunch.toolkit.context import _read_ranks

OTHERS = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "h", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("variables", "rank", "size"),
    [
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "SLURM_LOCALID": "3"}, 1, 4),
        ({"SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 3, 4),
        ({"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "8"}, 0, 8),
        ({"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4,3"}, 1, 1),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 2, 4),
        ({"MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}, 2, 4),
    ],
)
def test_local_rank_comes_from_variables_of_srun_and_mpirun(variables, rank, size):
    ranks = _read_ranks(OTHERS | variables)
    assert (ranks["LOCAL_RANK"], ranks["LOCAL_WORLD_SIZE"]) == (rank, size)
