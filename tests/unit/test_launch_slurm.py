from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from distlaunch.core.errors import EXIT_REQUEUE
from distlaunch.launch_slurm import Site, _Asked, _gpus, not_interrupted
from distlaunch.resolve.allocation import Allocation, Host
from distlaunch.resolve.options import TrainOptions

ENDING = "JobId=4 JobState=COMPLETING Reason=None RunTime=00:10:00 TimeLimit=01:00:00"
CANCELLED = "the job was cancelled"


@pytest.mark.parametrize(
    ("told", "why_not"),
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
        (
            ENDING.replace("COMPLETING", "NEWER"),
            "Slurm does not tell why the job was stopped (its state is NEWER)",
        ),
        ("slurm_load_jobs error: Invalid job id specified", "Slurm does not tell why the job was stopped"),
        ("", "Slurm does not tell why the job was stopped"),
        (None, "Slurm does not tell why the job was stopped"),
    ],
)
def test_a_job_that_somebody_has_cancelled_is_known_by_its_times(told, why_not):
    assert not_interrupted(told) == why_not


# --- another turn


@pytest.fixture
def conclude(tmp_path):
    """Conclude a job that asked for ``--requeue``, with a script as scontrol; give its exit code and what was said."""

    def concluding(code: int, *, told=None, warned=None, since_s=1.0, scontrol="exit 1", requeue=True):
        if scontrol is not None:
            program = tmp_path / "scontrol"
            program.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\n{scontrol}\n')
            program.chmod(0o755)
        environ = {"PATH": f"{tmp_path}:/bin:/usr/bin", "SLURM_JOB_ID": "7"}
        site = Site(environ, TrainOptions(requeue=requeue), part="all", several=False, flexible=False)
        policy = SimpleNamespace(told=told, warned=warned, since_warned_s=since_s)
        said: list[str] = []
        sink = SimpleNamespace(say=lambda text, level="info": said.append(f"{level}: {text}"))
        code = site.conclude(policy, code, sink)
        calls = tmp_path / "calls"
        return code, said, calls.read_text().splitlines() if calls.exists() else []

    return concluding


TERM, USR1 = signal.SIGTERM, signal.SIGUSR1
SHOWS = f'test "$1" != --oneliner || {{ echo "{ENDING}"; exit 0; }}; exit'


def test_a_job_that_was_not_interrupted_asks_slurm_nothing(conclude):
    for code, told, warned in ((0, None, None), (7, None, USR1), (130, signal.SIGINT, USR1)):
        assert conclude(code, told=told, warned=warned) == (code, [], [])
    assert conclude(143, told=TERM, requeue=False) == (143, [], [])


def test_a_warned_job_gets_another_turn_unless_it_went_on_for_long(conclude):
    asks = ["info: asking Slurm for another turn of this job (--requeue)"]
    assert conclude(0, warned=USR1, scontrol="exit 0") == (0, asks, ["requeue 7"])
    code, said, calls = conclude(0, warned=USR1, since_s=36_000.0)
    assert (code, calls) == (0, ["requeue 7"])  # no further call
    assert said == ["info: not requeued: the job went on for 36000 s after its last warning"]


def test_a_job_at_its_time_limit_gets_another_turn_and_a_cancelled_one_does_not(conclude):
    code, said, _ = conclude(143, told=TERM, scontrol=f"{SHOWS} 0")
    assert (code, said) == (143, [f"info: not requeued: {CANCELLED}"])
    code, _, calls = conclude(143, told=TERM, scontrol=f"{SHOWS} 0".replace("=None", "=TimeLimit"))
    assert (code, calls[-1]) == (143, "requeue 7")


def test_without_an_answer_a_stopped_job_is_not_asked_for_again_and_what_to_do_is_said(conclude):
    code, [said], calls = conclude(143, told=TERM, scontrol="echo down >&2; exit 1")
    assert code == 143
    why = "not requeued: Slurm does not tell why the job was stopped (scontrol ended with 1: down)"
    assert said == f"warning: {why}; to have another turn: scontrol requeue 7"
    assert calls == ["--oneliner show job 7"]


def test_what_slurm_refuses_the_batch_script_can_do(conclude):
    code, [_, said], _ = conclude(0, warned=USR1, scontrol="echo disabled >&2; exit 1")
    assert code == EXIT_REQUEUE
    what_to_do = "the batch script can do it (scontrol requeue 7): this ends with 75"
    assert said == f"warning: not requeued: scontrol ended with 1: disabled; {what_to_do}"
    code, said, _ = conclude(0, warned=USR1, scontrol="kill -TERM $$")
    assert (code, len(said)) == (0, 1), "Slurm has ended scontrol with the job, as it was asked to"


def test_a_command_that_hangs_is_given_up_with_all_that_it_has_started(tmp_path):
    asked = _Asked(("/bin/sh", "-c", f"sleep 1000 & echo $! >{tmp_path}/pid; wait"), os.environ)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("\n"):
        pass
    assert asked.answer(0.2) is None
    assert asked.problem == "/bin/sh did not answer within 0.2 s"
    pid = int((tmp_path / "pid").read_text())
    while _is_alive(pid):
        pass


def test_a_command_that_is_not_there_is_a_problem():
    asked = _Asked(("scontrol", "show", "config"), {"PATH": "/nowhere"})
    assert asked.answer() is None
    assert asked.problem == "scontrol cannot be run (No such file or directory)"


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


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
