from __future__ import annotations

import pytest

from distlaunch.core.model.plan import OuterLauncher
from distlaunch.core.probe.ancestors import Ancestor, ancestors
from distlaunch.planning.outer_launcher import SPAWNER, outer_launcher

TORCH = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
HOROVOD = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "8", "HOROVOD_LOCAL_RANK": "1"}
OURS = {**TORCH, "DISTLAUNCH_JOB_ID": "job"}
SPAWNED = "python -c from\xa0multiprocessing.spawn --multiprocessing-fork"


def chain(*lines: str) -> list[Ancestor]:
    return [Ancestor(name=line.partition(" ")[0], argv=tuple(line.split(" "))) for line in lines]


@pytest.mark.parametrize(
    ("environ", "lines", "launcher"),
    [
        (TORCH, ["/v/bin/python3.11 /v/bin/torchrun --no-python x"], "torchrun"),
        (TORCH, ["sh -c x", "python -u -X dev -m torch.distributed.run x"], "torchrun"),
        (
            TORCH,
            ["numactl -N 0 x", "python -m coverage run -m torch.distributed.run x"],
            "torchrun",
        ),
        (TORCH, ["uv run x", "python -m torch.distributed.launch x"], "torchrun"),
        (TORCH, ["python /v/bin/accelerate launch x"], "accelerate"),
        (
            TORCH,
            ["bash wrap.sh", "python -u -m deepspeed.launcher.launch --world_info=x x"],
            "deepspeed",
        ),
        (HOROVOD, ["/bin/sh -c env", SPAWNED, "python /v/bin/horovodrun -np 8 x"], "horovodrun"),
        (HOROVOD, ["bash -c cd", "sshd: user@notty"], "horovodrun"),
        (OURS, ["timeout 60 x", SPAWNER], "distlaunch"),
    ],
)
def test_only_shells_and_programs_that_run_a_command_may_stand_between(environ, lines, launcher):
    found = outer_launcher(environ, chain(*lines))
    assert found == OuterLauncher(launcher=launcher, rank=3, world_size=8, local_rank=1)


@pytest.mark.parametrize(
    ("environ", "lines"),
    [
        (TORCH, ["python train.py", "python -m torch.distributed.run x"]),
        (TORCH, ["python train.py --strategy deepspeed --launcher torchrun", "bash"]),
        (TORCH, ["sh -c x", "python train.py", "python /v/bin/torchrun x"]),
        (TORCH, [SPAWNED, "python /v/bin/torchrun x"]),
        (OURS, ["python train.py", SPAWNER]),
        (TORCH, ["bash", "tmux", "systemd"]),
        (TORCH, ["mpirun -n 2 x"]),
        (TORCH, ["slurmstepd: [1.0]"]),
        (TORCH, ["sshd: user@notty"]),
        ({**TORCH, "RANK": "x"}, ["python /v/bin/torchrun x"]),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, ["python /v/bin/torchrun x"]),
        (TORCH, []),
    ],
)
def test_a_process_in_between_that_is_a_program_of_its_own_makes_the_launcher_a_job_of_its_own(
    environ, lines
):
    assert outer_launcher(environ, chain(*lines)) is None


def test_the_ancestors_of_this_process_end_at_the_first_one():
    import os

    found = list(ancestors())
    assert found[0].argv
    assert len(found) < 64
    assert os.getppid() > 0
