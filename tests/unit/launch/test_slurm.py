from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from distlaunch.core.errors import EXIT_REQUEUE
from distlaunch.launch.slurm import (
    NodeAddresses,
    SlurmJob,
    _count_gpus,
    _SlurmCommand,
    why_not_requeued,
)
from distlaunch.planning.allocation import Allocation, Host
from distlaunch.planning.train_options import TrainOptions
from tests.facts import mentions

ENDING = "JobId=4 JobState=COMPLETING Reason=None RunTime=00:10:00 TimeLimit=01:00:00"
CANCELLED = "not requeued: the job was cancelled"
UNKNOWN = "not requeued: Slurm does not say why the job was stopped"


@pytest.mark.parametrize(
    ("reported", "why_not"),
    [
        (ENDING, CANCELLED),
        (ENDING.replace("COMPLETING", "CANCELLED"), CANCELLED),
        (ENDING.replace("Reason=None", "Reason=TimeLimit"), None),
        (ENDING.replace("RunTime=00:10:00", "RunTime=01:00:02"), None),
        (ENDING.replace("TimeLimit=01:00:00", "TimeLimit=1-00:00:00"), CANCELLED),
        (ENDING.replace("TimeLimit=01:00:00", "TimeLimit=UNLIMITED"), CANCELLED),
        (f"{ENDING} PreemptTime=2026-11-28T07:49:38", None),
        (f"{ENDING} PreemptTime=None", CANCELLED),
        (ENDING.replace("COMPLETING", "RUNNING"), None),
        (ENDING.replace("COMPLETING", "TIMEOUT"), None),
        (f"{ENDING} Requeue=1 Restarts=2", CANCELLED),
        (f"{ENDING} Requeue=1 Restarts=3", "Slurm itself has requeued this job"),
        (ENDING.replace("COMPLETING", "NEWER"), f"{UNKNOWN} (its state is NEWER)"),
        ("slurm_load_jobs error: Invalid job id specified", UNKNOWN),
        ("", UNKNOWN),
        (None, UNKNOWN),
    ],
)
def test_a_job_that_somebody_has_cancelled_is_known_by_its_times(reported, why_not):
    assert why_not_requeued(reported, restart_count=2) == why_not


# --- another turn


@pytest.fixture
def requeue_if_interrupted(tmp_path):
    """End a job with ``--requeue``, with a script as scontrol. Return the exit code and the
    messages."""

    def concluding(
        code: int, *, reported=None, warned=None, since_s=1.0, scontrol="exit 1", requeue=True
    ):
        if scontrol is not None:
            program = tmp_path / "scontrol"
            program.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\n{scontrol}\n')
            program.chmod(0o755)
        environ = {"PATH": f"{tmp_path}:/bin:/usr/bin", "SLURM_JOB_ID": "7"}
        site = SlurmJob(
            environ, TrainOptions(requeue=requeue), part="all", several=False, flexible=False
        )
        policy = SimpleNamespace(stop_signal=reported, warned=warned, since_warned_s=since_s)
        messages: list[str] = []
        sink = SimpleNamespace(say=lambda text, level="info": messages.append(f"{level}: {text}"))
        code = site.requeue_if_interrupted(policy, code, sink)
        calls = tmp_path / "calls"
        return code, messages, calls.read_text().splitlines() if calls.exists() else []

    return concluding


TERM, USR1 = signal.SIGTERM, signal.SIGUSR1
SHOWS = f'test "$1" != --oneliner || {{ echo "{ENDING}"; exit 0; }}; exit'


def test_a_job_that_was_not_interrupted_asks_slurm_nothing(requeue_if_interrupted):
    for code, reported, warned in ((0, None, None), (7, None, USR1), (130, signal.SIGINT, USR1)):
        assert requeue_if_interrupted(code, reported=reported, warned=warned) == (code, [], [])
    assert requeue_if_interrupted(143, reported=TERM, requeue=False) == (143, [], [])


def test_a_warned_job_gets_another_turn_unless_it_went_on_for_long(requeue_if_interrupted):
    code, [asks], calls = requeue_if_interrupted(0, warned=USR1, scontrol="exit 0")
    assert (code, calls) == (0, ["requeue 7"])
    assert mentions(asks, "info", "--requeue")
    code, messages, calls = requeue_if_interrupted(0, warned=USR1, since_s=36_000.0)
    assert (code, calls) == (0, ["requeue 7"])  # no further call
    assert len(messages) == 1
    assert mentions(messages, "info", "not requeued", "36000 s")


def test_a_job_at_its_time_limit_gets_another_turn_and_a_cancelled_one_does_not(
    requeue_if_interrupted,
):
    code, messages, _ = requeue_if_interrupted(143, reported=TERM, scontrol=f"{SHOWS} 0")
    assert (code, messages) == (143, [f"info: {CANCELLED}"])
    code, _, calls = requeue_if_interrupted(
        143, reported=TERM, scontrol=f"{SHOWS} 0".replace("=None", "=TimeLimit")
    )
    assert (code, calls[-1]) == (143, "requeue 7")


def test_without_an_answer_a_stopped_job_is_not_asked_for_again_and_what_to_do_is_reported(
    requeue_if_interrupted,
):
    code, [messages], calls = requeue_if_interrupted(
        143, reported=TERM, scontrol="echo down >&2; exit 1"
    )
    assert code == 143
    assert mentions(messages, "warning", UNKNOWN, "down", "scontrol requeue 7")
    assert calls == ["--oneliner show job 7"]


def test_the_batch_script_can_do_what_slurm_refuses(requeue_if_interrupted):
    code, [_, messages], _ = requeue_if_interrupted(
        0, warned=USR1, scontrol="echo disabled >&2; exit 1"
    )
    assert code == EXIT_REQUEUE
    what_to_do = "exit code 75 lets the batch script do it (scontrol requeue 7)"
    assert messages == f"warning: not requeued: scontrol ended with 1: disabled; {what_to_do}"
    code, messages, _ = requeue_if_interrupted(0, warned=USR1, scontrol="kill -TERM $$")
    assert (code, len(messages)) == (0, 1), (
        "Slurm has ended scontrol with the job, as it was asked to"
    )


@pytest.mark.parametrize(("tracker", "signals_all"), [("linuxproc", True), ("cgroup", False)])
def test_of_launchers_in_a_step_only_the_one_that_decides_asks_whom_slurms_signals_reach(
    tmp_path, tracker, signals_all
):
    program = tmp_path / "scontrol"
    program.write_text(
        f"#!/bin/sh\necho >>{tmp_path}/calls\necho ProctrackType = proctrack/{tracker}\n"
    )
    program.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/bin:/usr/bin", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
    options = TrainOptions(grace=100.0)
    site = SlurmJob(environ, options, part="node", several=False, flexible=False)
    assert not (tmp_path / "calls").exists()
    scheduler = site.scheduler()
    assert (scheduler.signals_all, scheduler.attempt) == (signals_all, 2)
    shell = SlurmJob(environ, options, part="all", several=False, flexible=False)
    assert not shell.scheduler().signals_all, "there is no step, and nobody else who could tell"


@pytest.mark.parametrize(
    ("line", "is_warned"),
    [
        ("", True),
        ("#SBATCH --no-kill", False),
        ("#SBATCH -N2 --no-kill  # go on", False),
        ("#SBATCH -k", False),
        ("#SBATCH -N 2 -Hk", False),
        ("#SBATCH --no-kill=off", True),
        ("#SBATCH --no-kill=no", True),
        ("#SBATCH -prack", True),
        ("#SBATCH -N2 -Jdesk", True),
        ("# -k", True),
    ],
)
def test_an_elastic_job_whose_script_has_no_word_of_no_kill_is_warned(tmp_path, line, is_warned):
    for name in ("scontrol", "srun"):
        program = tmp_path / name
        program.write_text(
            f"#!/bin/sh\ncat <<'END'\n#!/bin/bash\n{line}\ndistlaunch train t.py\nEND\n"
        )
        program.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/bin:/usr/bin", "SLURM_JOB_ID": "7"}
    site = SlurmJob(environ, TrainOptions(), part="all", several=True, flexible=True)
    _ = site.config  # which was asked for, too
    assert bool(site.notes()) == is_warned


NODES = """\
NodeName=n1 Arch=x86_64 Gres=gpu:a100:8 NodeAddr=10.1.0.1 NodeHostName=vm Port=11145 Version=22.05.8 OS=Linux 6.18
NodeName=n2 NodeAddr=n2-ib NodeHostName=n2 Port=23410 State=IDLE
NodeName=n3 NodeAddr=n3 NodeHostName=n3
NodeName=n4 NodeAddr=(null) NodeHostName=(null) State=DOWN
NodeName=n5 State=FUTURE
"""
"""What scontrol prints (of n1 a real Slurm 22.05, shortened)."""


def test_scontrol_is_asked_once_for_the_addresses_of_all_nodes(tmp_path):
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\necho \"$*\" >>{tmp_path}/asked\ncat <<'END'\n{NODES}END\n")
    program.chmod(0o755)
    addresses = NodeAddresses(
        {"PATH": f"{tmp_path}:/bin:/usr/bin"}, [f"n{number}" for number in range(1, 7)]
    )
    addresses.ask()
    found = [addresses.of(f"n{number}") for number in range(1, 7)]
    assert found == [("10.1.0.1",), ("n2-ib",), (), (), (), ()]
    assert (tmp_path / "asked").read_text() == "--oneliner show node n[1-6]\n"


def test_without_scontrol_no_address_is_known():
    assert NodeAddresses({"PATH": "/nowhere"}, ["n1"]).of("n1") == ()


def test_a_command_that_hangs_is_given_up_with_all_that_it_has_started(tmp_path):
    asked = _SlurmCommand(
        ("/bin/sh", "-c", f"sleep 1000 & echo $! >{tmp_path}/pid; wait"), os.environ
    )
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("\n"):
        pass
    assert asked.answer(0.2) is None
    assert mentions(asked.problem, "/bin/sh", "0.2 s")
    pid = int((tmp_path / "pid").read_text())
    while _is_alive(pid):
        pass


def test_a_command_that_is_not_there_is_a_problem():
    asked = _SlurmCommand(("scontrol", "show", "config"), {"PATH": "/nowhere"})
    assert asked.answer() is None
    assert mentions(asked.problem, "scontrol", "No such file or directory")


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def allocation(*hosts: Host) -> Allocation:
    return Allocation(source="slurm", hosts=hosts)


def test_the_steps_gpus_are_those_of_its_nodes_as_far_as_that_is_known():
    two = allocation(Host(name="a", slots=2, unit="gpus"), Host(name="b", slots=3, unit="gpus"))
    assert _count_gpus(["a", "b"], two, {}) == 5
    assert _count_gpus(["b"], two, {"SLURM_GPUS": "5"}) == 3
    unknown = allocation(Host(name="a", slots=3, unit="gpus"), Host(name="b", unit="gpus"))
    assert _count_gpus(["a", "b"], unknown, {"SLURM_GPUS": "a100:4"}) == 4
    assert (
        _count_gpus(
            ["a"], allocation(Host(name="a", unit="gpus"), Host(name="b")), {"SLURM_GPUS": "4"}
        )
        is None
    )
    assert _count_gpus(["a"], allocation(Host(name="a", slots=2)), {}) is None
