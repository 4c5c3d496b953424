from __future__ import annotations

import os
import select
import time
from itertools import groupby

import pytest

from distlaunch.core.model.host_list import expand_nodelist
from distlaunch.core.model.record import replace
from distlaunch.transport.child_process import KillSwitch
from distlaunch.transport.slurm.step import (
    Step,
    StepSettings,
    agent_argv,
    end_steps,
    node_list,
    step_argv,
    step_environ,
)
from tests.facts import mentions

FIXED = StepSettings(nodes=2, all_or_none=True, grace_s=25.0, inside=False)


def test_a_job_of_fixed_size_ends_with_any_of_its_agents():
    argv = step_argv(replace(FIXED, gpus=4), ["n1", "n2"], again=False)
    assert argv[0] == "srun"
    assert {
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--nodelist=n[1-2]",
        "--gpus=4",
    } <= set(argv)
    assert {"--mpi=none", "--export=ALL", "--kill-on-bad-exit=1", "--wait=55"} <= set(argv)
    assert not {"--overlap", "--no-kill"} & set(argv)


def test_an_elastic_job_outlives_agents_and_nodes():
    argv = step_argv(replace(FIXED, all_or_none=False), ["n1", "n2"], again=False)
    assert {"--kill-on-bad-exit=0", "--wait=0", "--no-kill"} <= set(argv)


def test_a_step_beside_others_shares_with_them_and_the_users_words_come_last():
    inside = replace(FIXED, inside=True, args=("--container-image", "a b"), gpus=4)
    assert step_argv(inside, ["n1", "n2"], again=False)[-2:] == ["--container-image", "a b"]
    assert "--overlap" in step_argv(inside, ["n1", "n2"], again=False)
    alone = step_argv(FIXED, ["n2"], again=True)
    assert "--overlap" in alone
    assert not [word for word in alone if word.startswith("--gpus")]


def test_the_components_of_a_heterogeneous_job_have_steps_of_their_own():
    wanted = replace(FIXED, components={"n4": 0, "n1": 1, "n2": 1}, nodes=3)
    assert "--het-group=1" in step_argv(wanted, ["n1", "n2"], again=False)
    assert "--het-group=0" in step_argv(wanted, ["n4"], again=False)
    assert not [word for word in step_argv(FIXED, ["n1"], again=False) if word.startswith("--het")]


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        (["login"], "login"),
        (["n1", "n2", "n4", "m08", "m09", "m10"], "n[1-2,4],m[08-10]"),
        (["rack1-n5", "rack2-n5", "rack2-n6"], "rack1-n5,rack2-n[5-6]"),
        (["r1-ib", "r2-ib"], "r1-ib,r2-ib"),
    ],
)
def test_nodes_are_written_with_brackets_at_the_end_of_a_name_only_as_slurm_has_them(hosts, text):
    assert node_list(hosts) == text
    assert expand_nodelist(text, where="") == hosts


def test_the_names_of_many_nodes_fit_into_an_argument():
    assert len(node_list([f"cluster-compute-node-{number:05d}" for number in range(20_000)])) < 100


def test_requests_for_the_jobs_own_tasks_are_left_out():
    words = {
        "SLURM_": "NTASKS NTASKS_PER_NODE NTASKS_PER_GPU NPROCS CPUS_PER_TASK CPUS_PER_GPU MEM_PER_NODE MEM_PER_CPU GPUS"
        " GPUS_PER_TASK GPUS_PER_NODE GPU_BIND CPU_BIND CPU_BIND_TYPE TRES_PER_TASK STDOUTMODE",
        "SRUN_": "CPUS_PER_TASK DEBUG",
    }
    dropped = [prefix + name for prefix, names in words.items() for name in names.split()]
    kept = (
        "SLURM_JOB_ID",
        "SLURM_CONF",
        "SLURM_JOB_NODELIST",
        "SLURM_CPUS_ON_NODE",
        "PATH",
        "MY_SLURM_NTASKS",
    )
    assert set(step_environ(dict.fromkeys((*dropped, *kept), "1"))) == set(kept)


@pytest.fixture
def start():
    """Start a shell script as srun, with something on its stdin."""
    kill_switch = KillSwitch()
    steps: list[Step] = []

    def starting(script: str, code: bytes = b"") -> Step:
        steps.append(
            Step(
                ["/bin/sh", "-c", script],
                ["n1"],
                code,
                {"PATH": os.environ["PATH"]},
                kill_switch=kill_switch,
            )
        )
        steps[-1].kill_switch = kill_switch
        return steps[-1]

    yield starting
    for step in steps:
        step.close()
        assert step.wait(until=float("inf"))


@pytest.fixture
def run(start):
    """Run such a script to the end of its output."""

    def running(script: str, code: bytes = b"") -> Step:
        step = start(script, code)
        while wanted := step.descriptors():
            poll = select.poll()
            for descriptor, mask in wanted.items():
                poll.register(descriptor, mask)
            assert poll.poll(30_000)
            step.send()
            step.read()
        return step

    return running


def test_all_of_the_code_goes_to_its_stdin(run):
    code = os.urandom(300_000)
    step = run("wc -c", code)
    assert list(step.lines) == ["300000"]


def test_output_of_one_that_reads_no_code_is_read_to_its_end(run):
    step = run("exec <&-; echo no", os.urandom(3_000_000))
    assert list(step.lines) == ["no"]


def test_output_of_srun_is_kept_printable_and_bounded(run):
    step = run(
        r"printf 'srun: \033[31merror\n\n  two  \n' >&2; for i in $(seq 100); do echo line $i; done; echo end"
    )
    assert len(step.lines) <= 50
    assert list(step.lines)[-1] == "end"
    step = run(r"printf '\033[31mred\n'; head -c 5000 /dev/zero | tr '\0' x")
    assert "\033" not in "".join(step.lines)
    assert max(map(len, step.lines)) <= 300


def test_the_last_output_is_read_after_the_end_even_without_a_line_end(start):
    step = start("printf 'srun: the reason'; exit 1")
    assert step.wait(until=float("inf"))
    step.finish_reading()
    assert list(step.lines) == ["srun: the reason"]


@pytest.mark.parametrize(
    ("script", "how"),
    [("exit 3", "srun ended with status 3"), ("kill -9 $$", "srun was killed by signal 9")],
)
def test_the_way_it_ended_is_reported(run, script, how):
    step = run(script)
    end_steps([step])
    assert step.is_over
    assert step.how_ended() == how


def test_one_that_does_not_end_is_ended(start):
    step = start("trap '' TERM; echo deaf; while :; do sleep 0.1; done")
    heard_its_first_line(step)
    assert mentions(step.how_ended(), "not ended")
    end_steps([step])
    assert step.wait(until=float("inf"))
    assert step.returncode == -9


def test_one_that_ends_when_it_is_asked_to_is_not_killed(start):
    step = start("trap 'exit 3' TERM; echo up; while :; do sleep 0.1; done")
    heard_its_first_line(step)
    end_steps([step])
    assert step.returncode == 3


def test_it_ends_with_its_kill_switch_while_it_waits_for_resources(start):
    step = start("trap '' TERM; echo 'srun: retrying'; while :; do sleep 0.1; done")
    heard_its_first_line(step)
    step.kill_switch.close()
    assert step.wait(until=float("inf"))
    assert step.returncode == -9


def heard_its_first_line(step: Step) -> None:
    poll = select.poll()
    step.send()
    [descriptor] = step.descriptors()
    poll.register(descriptor, select.POLLIN)
    while not step.lines:
        assert poll.poll(30_000)
        step.read()


class Silent:
    """A step that never ends, and records the calls."""

    def __init__(
        self, done: list[tuple[str, float]], *, has_called: bool = True, has_lost: bool = False
    ) -> None:
        self.done, self.has_called, self.has_lost = done, has_called, has_lost

    def wait(self, until: float) -> bool:
        self.done.append(("wait", until))
        return False

    def terminate(self) -> None:
        self.done.append(("TERM", 0.0))

    def close(self) -> None:
        self.done.append(("close", 0.0))


def test_silent_steps_are_waited_for_at_once():
    done: list[tuple[str, float]] = []
    end_steps([Silent(done), Silent(done, has_lost=True), Silent(done)])
    turns = [
        (what, [until for _, until in each])
        for what, each in groupby(done, key=lambda entry: entry[0])
    ]
    assert [(what, len(each)) for what, each in turns] == [
        *(("wait", 3), ("TERM", 3), ("wait", 3), ("close", 3), ("wait", 3))
    ]
    first, asked = turns[0][1], turns[2][1]
    assert first[0] == first[2] > first[1], (
        "for the end of a step that has lost an agent less is waited"
    )
    assert len(set(asked)) == 1


def test_a_step_that_waits_for_resources_is_asked_to_end_at_once():
    done: list[tuple[str, float]] = []
    before = time.monotonic()
    end_steps([Silent(done, has_called=False)])
    assert [what for what, _ in done[:2]] == ["wait", "TERM"]
    assert before <= done[0][1] <= time.monotonic(), "it is looked at, and not waited for"


def test_the_agents_shell_needs_no_python_of_the_launchers():
    argv = agent_argv(("10.0.0.1", "4000", "7", "60"), count=5, pythons=["/opt/python"])
    assert argv[:2] == ["/bin/sh", "-c"]
    assert argv[-5:] == ["10.0.0.1", "4000", "7", "60", "/opt/python"]
