"""A launcher in each task of a step of a running Slurm."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys

import pytest

from tests.cluster import slurm_jobs

pytestmark = [
    pytest.mark.timeout(240),
    # test_slurm_jobs shows what depends on how Slurm tracks processes.
    pytest.mark.parametrize("slurm", ["cgroup"], indirect=True, scope="session"),
]


class Job(slurm_jobs.Job):
    """A job with a step of launchers. The test bed's node names cannot be resolved: Slurm gives the
    addresses."""

    def __init__(self, slurm, options: str, **more: str) -> None:
        for node in ("n1", "n2", "n3", "n4"):
            with pytest.raises(socket.gaierror):
                socket.getaddrinfo(node, None)
        super().__init__(slurm, options, **more)


SIZES = {1: "--procs-per-node 1", 2: "--device cpu"}
"""What says, without GPUs, that each of so many tasks a node has one worker."""


def step(options: str, after: str = "") -> str:
    """Write a batch script whose step has a launcher in each task. Its exit code is srun's."""
    return f"exec srun --label {options} {{}} {after}"


def test_a_task_a_node_is_a_launcher_with_all_that_the_job_has_there(slurm):
    job = Job(slurm, "-N2 -w n1,n4 --gpus-per-node=2", script=step("--ntasks-per-node=1"))
    reports = job.up(4)
    placed = [
        (each["RANK"], each["SLURMD_NODENAME"], each["LOCAL_RANK"], each["LOCAL_WORLD_SIZE"])
        for each in reports
    ]
    assert placed == [
        ("0", "n1", "0", "2"),
        ("1", "n1", "1", "2"),
        ("2", "n4", "0", "2"),
        ("3", "n4", "1", "2"),
    ]
    job.enough()
    done = job.wait()
    assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done.output


@pytest.mark.parametrize(
    ("request_", "bound", "local"),
    [
        ("--gpus-per-node=2", "", "01"),
        ("--gpus-per-node=2", "--gpu-bind=single:1", "00"),
        ("--gpus-per-task=1", "--gpus-per-task=1", "00"),
    ],
)
def test_a_task_a_gpu_is_a_launcher_that_is_its_rank(slurm, request_, bound, local):
    job = Job(slurm, f"-N2 -w n1,n4 --ntasks-per-node=2 {request_}", script=step(bound))
    reports = job.up(4)
    assert [each["RANK"] for each in reports] == ["0", "1", "2", "3"]
    assert [each["SLURMD_NODENAME"] for each in reports] == ["n1", "n1", "n4", "n4"]
    assert {each["WORLD_SIZE"] for each in reports} == {"4"}
    assert [each["LOCAL_RANK"] for each in reports] == [*local, *local], (
        "a worker that has one device has the index 0"
    )
    job.enough()
    done = job.wait()
    assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done.output


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_failure_ends_every_launcher_with_its_exit_code(slurm, tasks):
    ends = slurm.work / f"ends-{tasks}"
    ends.mkdir()
    each = f"sh -c '\"$@\"; code=$?; echo $code >{ends}/$SLURM_PROCID; exit $code' sh"
    options = f"-N2 -w n1,n2 --ntasks-per-node={tasks}"
    job = Job(slurm, options, size=SIZES[tasks], script=f"exec srun --label {each} {{}}")
    count = 2 * tasks
    job.up(count)
    job.fail(count - 1)
    done = job.wait()
    assert (done.state, done.exit_code) == ("FAILED", "7:0"), done.output
    assert {int(path.name): path.read_text() for path in ends.iterdir()} == dict.fromkeys(
        range(count), "7\n"
    )
    assert re.search(rf"rank {count - 1} of {count} on \S+ failed: exit code 7", done.output)


def test_a_launcher_that_is_killed_ends_the_others_and_its_workers(slurm):
    first, last = (
        Job(slurm, f"-N2 -w {nodes}", script=step("--ntasks-per-node=1"))
        for nodes in ("n1,n2", "n3,n4")
    )
    first.up(2)
    last.up(2)
    os.kill(first.launcher("n1").pid, signal.SIGKILL)
    os.kill(last.launcher("n4").pid, signal.SIGKILL)
    for job, other in ((first, 1), (last, 0)):
        done = job.wait()
        assert done.state == "FAILED", done.output
        assert job.signals_got()[other] == [
            "SIGTERM",
            "saved",
        ]  # by proctrack/cgroup Slurm kills at once what a task leaves


def test_each_worker_of_a_step_gets_each_signal_of_slurm_once(slurm):
    cancelled = Job(slurm, "-N2 -w n1,n2 --ntasks-per-node=2", size=SIZES[2], script=step(""))
    warned = Job(slurm, "-N2 -w n3,n4", script=step("--ntasks-per-node=1"), words="leaves")
    cancelled.up(4)
    warned.up(2)
    slurm.run("scancel", "--signal=USR1", str(warned.id))
    slurm.run("scancel", "--signal=USR2", str(cancelled.id))
    cancelled.wait_signals("SIGUSR2")
    slurm.run("scancel", str(cancelled.id))
    done = cancelled.wait()
    assert done.state == "CANCELLED", done.output
    assert "does not speak" not in done.output
    assert cancelled.signals_got() == [["SIGUSR2", "SIGTERM", "saved"]] * 4
    done = warned.wait()
    assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done.output
    assert warned.signals_got() == [["SIGUSR1", "saved"]] * 2


STRANGER = """
import sys, time
from distlaunch import __version__
from distlaunch.core.agent.connect import connect_to_listener
from distlaunch.core.protocol.handshake import JobIdentity
job = int(sys.argv[1])
job_identity = JobIdentity(release=__version__, job_key=f"{job}.0")
ports = [20000 + job * 4 % 10000 + more for more in range(4)]
connect_to_listener("127.0.0.1", ports, job_identity=job_identity, rank=1, own_host="n9", instance="i", until=time.monotonic() + 3.0)
"""


def test_the_launchers_of_a_step_know_each_other_by_munge(slurm):
    job = Job(slurm, "-N2 -w n1,n2", script=step("--ntasks-per-node=1"))
    job.up(2)
    environ = {"PYTHONPATH": str(slurm_jobs.ROOT)}
    with pytest.raises(AssertionError, match="requires munge"):
        slurm.run(sys.executable, "-c", STRANGER, str(job.id), **environ)
    job.enough()
    done = job.wait()
    assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done.output
    assert "no token" not in done.output
    assert "(n9) to port" in done.output
