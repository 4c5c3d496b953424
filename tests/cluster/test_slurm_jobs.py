"""``distlaunch train`` in batch scripts of a running Slurm: on all of the job's nodes, and whatever Slurm does to it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys

import pytest

from tests.cluster.slurm_jobs import ROOT, SHORT, Job, node_killed, until

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module", autouse=True)
def limited(slurm) -> Job:
    """Give a job that comes to its time limit while others are tested: Slurm looks for these twice a minute."""
    job = Job(slurm, "-N2 -w n3,n4 --time=9", train="--requeue")
    job.up(2)
    slurm.run("scontrol", "update", f"JobId={job.id}", "EndTime=now+1")
    return job


def placed(told) -> list[tuple[str, str, str]]:
    return [(each["SLURMD_NODENAME"], each["LOCAL_RANK"], each["CUDA_VISIBLE_DEVICES"]) for each in told]


def test_a_batch_script_has_workers_on_all_nodes_whatever_was_asked_for_its_tasks(slurm):
    jobs = {
        "four": (Job(slurm, "-N4 --gpus-per-node=2"), 8),
        "gres": (Job(slurm, "-N2 -w n1,n4 --gres=gpu:2"), 4),
        "tasks": (Job(slurm, "-N2 -w n1,n2 --ntasks-per-node=2 --cpus-per-task=2 --gpus-per-node=1"), 2),
        "per-gpu": (Job(slurm, "-N2 -w n1,n2 --ntasks-per-gpu=1 --gpus=2"), 2),
        "per-task": (Job(slurm, "-N2 -w n2,n4 -n3 --gpus-per-task=1"), 3),
        "heterogeneous": (Job(slurm, "-w n4 --gpus-per-node=a100:2 : -w n1,n2 --gpus-per-node=1"), 4),
    }
    told = {name: job.up(count) for name, (job, count) in jobs.items()}
    nodes = [f"n{number}" for number in (1, 2, 3, 4)]
    assert placed(told["four"]) == [(node, rank, "0,1") for node in nodes for rank in "01"]
    assert [each["LOCAL_RANK"] for each in told["gres"]] == ["0", "1", "0", "1"]
    assert sorted(each["SLURMD_NODENAME"] for each in told["per-task"]) in (["n2", "n2", "n4"], ["n2", "n4", "n4"])
    mixed = [(node, local) for node, local, _ in placed(told["heterogeneous"])]
    assert mixed == [("n4", "0"), ("n4", "1"), ("n1", "0"), ("n2", "0")]
    for name, each in told.items():
        assert [one["RANK"] for one in each] == [str(rank) for rank in range(len(each))], name
        assert {one["WORLD_SIZE"] for one in each} == {str(len(each))}
        assert {one["DISTLAUNCH_TOKEN"] for one in each} == {None}
        job = jobs[name][0]
        job.enough()
    for job, _ in jobs.values():
        done = job.wait()
        assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done.output
        assert "srun:" not in done.output


def test_a_failure_ends_the_job_with_the_workers_own_exit_code(slurm):
    one, two = Job(slurm, "-N2 -w n1,n2"), Job(slurm, "-N2 -w n3,n4", train="--max-restarts 1 --min-uptime 0")
    one.up(2)
    one.fail(1)
    two.up(2)
    two.fail(0)
    two.up(2, attempt=1)
    for job, rank in ((one, 1), (two, 0)):
        done = job.wait()
        assert (done.state, done.exit_code) == ("FAILED", "7:0"), done.output
        assert re.search(rf"rank {rank} of 2 on n\d failed: exit code 7", done.output)


def test_salloc_reaches_nodes_from_a_machine_that_is_none_of_them(slurm):
    script = slurm.work / "names.py"
    script.write_text("import os; print('rank', os.environ['RANK'], 'on', os.environ['SLURMD_NODENAME'])")
    words = f"{shlex.quote(sys.executable)} -m distlaunch train --procs-per-node 1 {SHORT} {script}"
    told = slurm.salloc(f"exec 2>&1; XDG_STATE_HOME={slurm.work}/state PYTHONPATH={ROOT} {words}", "-N2", "-w", "n2,n3")
    assert "rank 0 on n2\n" in told
    assert "rank 1 on n3\n" in told


def test_each_worker_gets_each_signal_of_slurm_once(slurm):
    cancelled, warned = Job(slurm, "-N2 -w n1,n2"), Job(slurm, "-N2 -w n3,n4", words="leaves")
    cancelled.up(2)
    warned.up(2)
    slurm.run("scancel", "--batch", "--signal=USR1", str(warned.id))
    slurm.run("scancel", "--signal=USR2", str(cancelled.id))
    cancelled.wait_heard("SIGUSR2")
    slurm.run("scancel", "--batch", "--signal=USR1", str(cancelled.id))
    cancelled.wait_heard("SIGUSR2", "SIGUSR1")
    slurm.run("scancel", str(cancelled.id))
    done = cancelled.wait()
    assert (done.state, done.exit_code) == ("CANCELLED", "143:0"), done.output
    assert cancelled.heard() == [["SIGUSR2", "SIGUSR1", "SIGTERM", "saved"]] * 2
    assert "stopped: 2 workers ended, none had to be killed" in done.output
    done = warned.wait()
    assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done.output
    assert warned.heard() == [["SIGUSR1", "saved"]] * 2


def test_a_job_that_was_warned_gets_another_turn_and_one_that_was_cancelled_does_not(slurm):
    requeued = Job(slurm, "-N2 -w n1,n2", train="--requeue --job-id again", words="leaves")
    refused = Job(slurm, "-N1 -w n3 --no-requeue", train="--requeue", words="leaves")
    cancelled = Job(slurm, "-N1 -w n4", train="--requeue", script="{}")
    requeued.up(2)
    slurm.run("scancel", "--batch", "--signal=USR1", str(requeued.id))
    until(lambda: requeued.fields()["JobState"] == "PENDING", "the job to be pending again")
    refused.up(1)
    slurm.run("scancel", "--batch", "--signal=USR1", str(refused.id))
    cancelled.up(1)
    slurm.run("scancel", str(cancelled.id))
    # Slurm itself waits two minutes; in the second in which a job was ended, its nodes refuse it.
    slurm.run("scontrol", "update", f"JobId={requeued.id}", "StartTime=now+2")
    told = requeued.up(2, attempt=1)
    assert {each["TORCHELASTIC_RESTART_COUNT"] for each in told} == {"1"}
    requeued.enough()
    done = requeued.wait()
    assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done.output
    assert "asking Slurm for another turn" in done.output
    assert "there are logs of a job again already; this one's: " in done.output
    done = refused.wait()
    assert (done.state, done.exit_code) == ("FAILED", "75:0"), done.output
    assert re.search(
        r"not requeued: scontrol ended with 1: .*; the batch script can do it \(scontrol requeue \d+\): this ends with 75", done.output
    )
    done = cancelled.wait()
    assert done.state == "CANCELLED", done.output
    assert "have the script start this by exec" in done.output


def test_an_agent_that_is_killed_is_a_lost_node(slurm):
    fixed = Job(slurm, "-N2 -w n1,n2")
    again = Job(slurm, "-N2 -w n1,n3", train="--max-restarts 1")
    elastic = Job(slurm, "-N3 -w n2,n3,n4 --no-kill", train="--num-nodes 2:3")
    for job, count in ((fixed, 2), (again, 2), (elastic, 3)):
        job.up(count)
    for job, node in ((fixed, "n2"), (again, "n1"), (elastic, "n3")):
        os.kill(job.agent(node).pid, signal.SIGKILL)
    done = fixed.wait()
    assert (done.state, done.exit_code) == ("FAILED", "69:0"), done.output
    assert "rank 1 of 2 on n2 failed: the node is lost" in done.output
    elastic.up(2, attempt=1)
    assert [each["SLURMD_NODENAME"] for each in elastic.told(1)] == ["n2", "n4"]
    elastic.enough()
    again.up(2, attempt=1)
    again.enough()
    for job in (again, elastic):
        done = job.wait()
        assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done.output


def test_a_node_that_dies_ends_a_job_of_fixed_size_and_not_an_elastic_one(slurm):
    fixed = Job(slurm, "-N2 -w n1,n2")
    elastic = Job(slurm, "-N3 -w n1,n2,n4 --no-kill", train="--num-nodes 2:3")
    fixed.up(2)
    elastic.up(3)
    with node_killed(slurm, "n2"):
        elastic.up(2, attempt=1)
        elastic.enough()
        for job in (fixed, elastic):
            job.wait_launcher()
    done = fixed.wait()
    assert (done.state, done.exit_code) == ("FAILED", "69:0"), done.output
    assert "rank 1 of 2 on n2 failed: the node is lost" in done.output
    done = elastic.wait()
    assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done.output


def test_the_time_limit_leaves_workers_time_to_save(slurm, limited):
    until(lambda: limited.fields()["JobState"] == "PENDING", "the time limit, and the job to be pending again", 90)
    assert limited.heard() == [["SIGTERM", "saved"]] * 2
    assert "asking Slurm for another turn" in limited.output
    slurm.run("scancel", str(limited.id))
    limited.wait()
