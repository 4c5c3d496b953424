"""``distlaunch train`` in batch scripts of a running Slurm."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time

import pytest

from tests.cluster.slurm_jobs import ROOT, SHORT, Job, Process, node_killed, until
from tests.facts import mentions
from tests.launcher import PROGRAMS

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module", autouse=True)
def limited(slurm) -> list[Job]:
    """Return jobs that reach their time limit while other tests run: Slurm checks limits twice a
    minute."""
    jobs = [Job(slurm, "-N2 -w n3,n4 --time=9", train=train) for train in ("--requeue", "")]
    for job in jobs:
        job.up(2)
        slurm.run("scontrol", "update", f"JobId={job.id}", "EndTime=now+1")
    return jobs


def placed(reports) -> list[tuple[str, str, str]]:
    return [
        (each["SLURMD_NODENAME"], each["LOCAL_RANK"], each["CUDA_VISIBLE_DEVICES"])
        for each in reports
    ]


def test_a_task_is_tracked_as_the_test_bed_was_asked_to(slurm):
    groups = slurm.srun("-n1", "cat", "/proc/self/cgroup").splitlines()
    (freezer,) = [line.split(":")[2] for line in groups if ":freezer:" in line] or ["/"]
    assert bool(re.fullmatch(r"/slurm_n\d+/uid_0/job_\d+/step_0", freezer)) == (
        slurm.tracker == "cgroup"
    )


def test_a_batch_script_has_workers_on_all_nodes_whatever_was_asked_for_its_tasks(slurm):
    jobs = {
        "four": (Job(slurm, "-N4 --gpus-per-node=2"), 8),
        "gres": (Job(slurm, "-N2 -w n1,n4 --gres=gpu:2"), 4),
        "tasks": (
            Job(slurm, "-N2 -w n1,n2 --ntasks-per-node=2 --cpus-per-task=2 --gpus-per-node=1"),
            2,
        ),
        "per-gpu": (Job(slurm, "-N2 -w n1,n2 --ntasks-per-gpu=1 --gpus=2"), 2),
        "per-task": (Job(slurm, "-N2 -w n2,n4 -n3 --gpus-per-task=1"), 3),
        "cpu": (
            Job(slurm, "-N2 -w n1,n2 --ntasks-per-node=2 --gpus-per-node=1", size="--device cpu"),
            4,
        ),
        "heterogeneous": (
            Job(slurm, "-w n4 --gpus-per-node=a100:2 : -w n1,n2 --gpus-per-node=1"),
            4,
        ),
    }
    reports = {name: job.up(count) for name, (job, count) in jobs.items()}
    nodes = [f"n{number}" for number in (1, 2, 3, 4)]
    assert placed(reports["four"]) == [(node, rank, "0,1") for node in nodes for rank in "01"]
    assert [each["LOCAL_RANK"] for each in reports["gres"]] == ["0", "1", "0", "1"]
    assert sorted(each["SLURMD_NODENAME"] for each in reports["per-task"]) in (
        ["n2", "n2", "n4"],
        ["n2", "n4", "n4"],
    )
    assert placed(reports["cpu"]) == [(node, rank, "") for node in ("n1", "n2") for rank in "01"]
    mixed = [(node, local) for node, local, _ in placed(reports["heterogeneous"])]
    assert mixed == [("n4", "0"), ("n4", "1"), ("n1", "0"), ("n2", "0")]
    for name, each in reports.items():
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
    one, two = (
        Job(slurm, "-N2 -w n1,n2"),
        Job(slurm, "-N2 -w n3,n4", train="--max-restarts 1 --min-uptime 0"),
    )
    one.up(2)
    one.fail(1)
    two.up(2)
    two.fail(0)
    two.up(2, attempt=1)
    two.fail(0, attempt=1)
    for job, rank in ((one, 1), (two, 0)):
        done = job.wait()
        assert (done.state, done.exit_code) == ("FAILED", "7:0"), done.output
        assert re.search(rf"rank {rank} of 2 on n\d failed: exit code 7", done.output)


def test_a_restart_waits_for_its_delay_and_a_signal_ends_the_wait(slurm):
    options = "--max-restarts 1 --min-uptime 0 --restart-delay"
    waits = Job(slurm, "-N2 -w n1,n2", train=f"{options} 2")
    ended = Job(slurm, "-N2 -w n3,n4", train=f"{options} 1h")
    for job in (waits, ended):
        job.up(2)
    begun = time.monotonic()
    for job in (waits, ended):
        job.fail(0)
    until(lambda: "restarting in 2 s ..." in waits.output, "the notice of the delay")
    waits.up(2, attempt=1)
    assert time.monotonic() - begun > 2.0
    waits.enough()
    until(lambda: "restarting in 3,600 s ..." in ended.output, "the notice of the delay")
    slurm.run("scancel", "--signal=TERM", "--batch", str(ended.id))
    done = ended.wait()
    assert (done.state, done.exit_code) == ("FAILED", "143:0"), done.output
    done = waits.wait()
    assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done.output


def test_signals_after_the_verdict_do_not_change_the_exit_code(slurm):
    script = (
        "export XDG_STATE_HOME=$SIGN_DIR; {} & launcher=$!\n"
        "until grep -qs job_ended $SIGN_DIR/distlaunch/jobs/*/events.jsonl; do :; done\n"
        "while kill -TERM $launcher 2>/dev/null; do :; done\n"
        "wait $launcher"
    )
    job = Job(slurm, "-N2 -w n1,n2", script=script)
    job.up(2)
    job.fail(1)
    done = job.wait()
    assert (done.state, done.exit_code) == ("FAILED", "7:0"), done.output
    assert re.search(r"rank 1 of 2 on n\d failed: exit code 7", done.output)


def test_salloc_reaches_nodes_from_a_machine_that_is_none_of_them(slurm):
    script = slurm.work / "names.py"
    script.write_text(
        "import os; print('rank', os.environ['RANK'], 'on', os.environ['SLURMD_NODENAME'])"
    )
    words = f"{shlex.quote(sys.executable)} -m distlaunch train --procs-per-node 1 {SHORT} {script}"
    reports = slurm.salloc(
        f"exec 2>&1; XDG_STATE_HOME={slurm.work}/state PYTHONPATH={ROOT} {words}",
        "-N2",
        "-w",
        "n2,n3",
    )
    assert "rank 0 on n2\n" in reports
    assert "rank 1 on n3\n" in reports


def test_processes_left_on_slurms_nodes_are_waited_for_and_then_ended(slurm):
    words = (
        f"{shlex.quote(sys.executable)} -m distlaunch train --procs-per-node 1 --linger 0.1 {SHORT}"
    )
    program = f"{PROGRAMS / 'uploads.py'} --ranks 0,1"
    reports = slurm.salloc(
        f"exec 2>&1; cd {slurm.work}; XDG_STATE_HOME={slurm.work}/state PYTHONPATH={ROOT} {words} {program}",
        *("-N2", "-w", "n2,n3"),
    )
    assert "ended 2 processes left by ranks 0-1 on n[2-3]: " in reports
    assert (slurm.work / "got-TERM-1").exists()


def test_the_programs_of_wrappers_save_on_slurms_nodes(slurm):
    folder = slurm.work / "wrapped"
    folder.mkdir()
    words = (
        f"{shlex.quote(sys.executable)} -m distlaunch train --procs-per-node 1 --grace 60 {SHORT}"
    )
    script = f"""
exec 2>&1
cd {folder}
XDG_STATE_HOME={slurm.work}/state PYTHONPATH={ROOT} {words} {PROGRAMS}/wraps.py {PROGRAMS}/waits.py --save TERM &
signs() {{ while [ ! -e "$1-0" ] || [ ! -e "$1-1" ]; do kill -0 $! || exit 1; sleep 0.05; done; }}
signs ready
kill -TERM $!
signs got-TERM
touch go
wait $!
echo "ended with $?"
"""
    reports = slurm.salloc(script, "-N2", "-w", "n2,n3")
    assert mentions(reports, "stopped", "2 workers", "none")
    assert "ended with 143" in reports
    assert (folder / "saved-0").exists()
    assert (folder / "saved-1").exists()


def test_each_worker_gets_each_signal_of_slurm_once(slurm):
    cancelled, warned = Job(slurm, "-N2 -w n1,n2"), Job(slurm, "-N2 -w n3,n4", words="leaves")
    cancelled.up(2)
    warned.up(2)
    slurm.run("scancel", "--batch", "--signal=USR1", str(warned.id))
    slurm.run("scancel", "--signal=USR2", str(cancelled.id))
    cancelled.wait_signals("SIGUSR2")
    slurm.run("scancel", "--batch", "--signal=USR1", str(cancelled.id))
    cancelled.wait_signals("SIGUSR2", "SIGUSR1")
    slurm.run("scancel", str(cancelled.id))
    done = cancelled.wait()
    assert (done.state, done.exit_code) == ("CANCELLED", "143:0"), done.output
    assert cancelled.signals_got() == [["SIGUSR2", "SIGUSR1", "SIGTERM", "saved"]] * 2
    assert mentions(done.output, "stopped", "2 workers", "none")
    done = warned.wait()
    assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done.output
    assert warned.signals_got() == [["SIGUSR1", "saved"]] * 2


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
    requeued.next_turn(2)
    done = requeued.wait()
    assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done.output
    assert mentions(done.output, "requeueing")
    assert mentions(done.output, "already logs", "job again", "logs")
    done = refused.wait()
    assert (done.state, done.exit_code) == ("FAILED", "75:0"), done.output
    assert re.search(
        r"not requeued: .* 1: .*; .* 75 .* \(scontrol requeue \d+\)",
        done.output,
    )
    done = cancelled.wait()
    assert done.state == "CANCELLED", done.output
    assert mentions(done.output, "distlaunch", "exec")


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
    assert mentions(done.output, "rank 1 of 2 on n2", "lost")
    elastic.up(2, attempt=1)
    assert [each["SLURMD_NODENAME"] for each in elastic.reports(1)] == ["n2", "n4"]
    elastic.enough()
    again.up(2, attempt=1)
    slurm.run("scancel", "--signal=TERM", str(again.id))  # to the agents alone
    done = again.wait()
    assert (done.state, done.exit_code) == ("FAILED", "143:0"), done.output
    assert again.signals_got(attempt=1) == [["SIGTERM", "saved"]] * 2
    done = elastic.wait()
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
    assert mentions(done.output, "rank 1 of 2 on n2", "lost")
    done = elastic.wait()
    assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done.output


def test_the_time_limit_leaves_workers_time_to_save(slurm, limited):
    again, ended = limited
    until(
        lambda: again.fields()["JobState"] == "PENDING",
        "the time limit, and the job to be pending again",
        90,
    )
    assert again.signals_got() == [["SIGTERM", "saved"]] * 2
    assert mentions(again.output, "requeueing")
    slurm.run("scancel", str(again.id))
    again.wait()
    done = ended.wait()
    assert done.state == "TIMEOUT", done.output
    assert ended.signals_got() == [["SIGTERM", "saved"]] * 2
    assert mentions(done.output, "stopped", "2 workers", "none")


@pytest.mark.parametrize("grace_s", [0, 60])
def test_a_job_that_is_preempted_saves_once_and_goes_on_in_its_next_turn(slurm, grace_s):
    slurm.run("scontrol", "update", "PartitionName=cheap", f"GraceTime={grace_s}")
    job = Job(slurm, "-p cheap -N2 -w n1,n2", train=f"--requeue --job-id cheap-{grace_s}")
    job.up(2)
    urgent = slurm.submit("sleep 1000", "--exclusive", "-N1", "-w", "n2")
    until(lambda: job.fields()["JobState"] == "PENDING", "the job to be pending again", 90)
    assert job.signals_got() == [["SIGTERM", "saved"]] * 2
    slurm.run("scancel", str(urgent))
    job.next_turn(2)
    done = job.wait()
    assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done.output
    assert done.output.count("stopped: 2 workers") == 1
    assert mentions(done.output, "already logs", f"cheap-{grace_s}")
    asks = "requeueing" if grace_s else "has requeued"
    assert asks in done.output
    assert "not requeued" not in done.output


def test_a_launcher_that_is_killed_leaves_workers_time_to_save(slurm):
    job = Job(slurm, "-N2 -w n1,n2", script="{}; sleep 1000")
    job.up(2)
    os.kill(job.launcher().pid, signal.SIGKILL)
    until(lambda: job.signals_got() == [["SIGTERM", "saved"]] * 2, "all workers to have saved")
    until(
        lambda: not job.processes("srun", "dl-", sys.executable),
        "the end of all that it has started",
    )
    slurm.run("scancel", str(job.id))
    job.wait()


def test_an_srun_that_waits_for_resources_ends_with_its_launcher(slurm):
    job = Job(slurm, "-N2 -w n1,n2", script="srun -N2 -n2 sleep 1000 & sleep 2; {}; sleep 1000")

    def waiting() -> list[Process]:
        return [each for each in job.processes("srun") if "--job-name=distlaunch" in each.words]

    until(lambda: "0 of 2 nodes are here" in job.output and waiting(), "srun to wait")
    os.kill(job.launcher().pid, signal.SIGKILL)
    until(lambda: not waiting(), "the end of srun")
    assert not job.reports()
    slurm.run("scancel", str(job.id))
    job.wait()
