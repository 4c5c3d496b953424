from __future__ import annotations

import pytest

from distlaunch.launch_slurm import _gpus, is_cancelled
from distlaunch.resolve.allocation import Allocation, Host

ENDING = "JobId=4 JobState=COMPLETING Reason=None RunTime=00:10:00 TimeLimit=01:00:00"


@pytest.mark.parametrize(
    ("told", "cancelled"),
    [
        (ENDING, True),
        (ENDING.replace("COMPLETING", "CANCELLED"), True),
        (ENDING.replace("Reason=None", "Reason=TimeLimit"), False),
        (ENDING.replace("RunTime=00:10:00", "RunTime=01:00:02"), False),
        (ENDING.replace("TimeLimit=01:00:00", "TimeLimit=1-00:00:00"), True),
        (ENDING.replace("TimeLimit=01:00:00", "TimeLimit=UNLIMITED"), True),
        (f"{ENDING} PreemptTime=2026-11-28T07:49:38", False),
        (f"{ENDING} PreemptTime=None", True),
        (ENDING.replace("COMPLETING", "RUNNING"), False),
        ("", False),
    ],
)
def test_a_job_that_somebody_has_cancelled_is_known_by_its_times(told, cancelled):
    assert is_cancelled(told) is cancelled


def allocation(*hosts: Host) -> Allocation:
    return Allocation(source="slurm", hosts=hosts)


def test_the_steps_gpus_are_those_of_its_nodes_as_far_as_that_is_known():
    two = allocation(Host(name="a", slots=2, unit="gpus"), Host(name="b", slots=3, unit="gpus"))
    assert _gpus(["a", "b"], two, {}) == 5
    assert _gpus(["b"], two, {"SLURM_GPUS": "5"}) == 3
    unknown = allocation(Host(name="a", slots=3, unit="gpus"), Host(name="b", unit="gpus"))
    assert _gpus(["a", "b"], unknown, {"SLURM_GPUS": "a100:4"}) == 4
    assert _gpus(["a"], allocation(Host(name="a", unit="gpus"), Host(name="b")), {"SLURM_GPUS": "4"}) is None
    assert _gpus(["a"], allocation(Host(name="a", slots=2)), {}) is None
