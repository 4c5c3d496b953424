"""`init` under launchers and without one, and the end of the group: together, alone, or never."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "programs" / "toolkit" / "uses_group.py"
AGAIN = PROGRAM.with_name("again.py")
TURNS = [
    f"turn {turn} had step {turn} and sum 3, and leaves 0 threads of gloo's" for turn in range(3)
]


@pytest.fixture
def train(distlaunch):
    """Return ``distlaunch.train`` with torch preloaded."""
    return functools.partial(distlaunch.train_warm, preload="torch")


def drawn(text: str) -> list[tuple[str, ...]]:
    return [tuple(line.split()[-4:]) for line in text.splitlines() if "drawn" in line]


def test_a_plain_script_is_a_world_of_one_whose_collectives_work(clean_env, tmp_path):
    argv = [sys.executable, PROGRAM, "end"]
    done = subprocess.run(
        argv, capture_output=True, text=True, env=clean_env, cwd=tmp_path, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "rank 0 of 1, local 0 of 1, cpu gloo ddp attempt 0, sum 1"
    assert drawn(done.stdout)[0][0] == "7", "a single worker has the seed as it was given"


def test_the_module_can_be_loaded_again_as_notebooks_do(clean_env, tmp_path):
    again = (
        "import importlib; from distlaunch.toolkit import context; importlib.reload(context).init()"
    )
    argv = [sys.executable, "-c", again]
    done = subprocess.run(
        argv, capture_output=True, text=True, env=clean_env, cwd=tmp_path, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_workers_of_a_job_share_sums_and_no_random_numbers(distlaunch, train):
    done = distlaunch.train("--num-procs", "2", PROGRAM, "end", timeout=100)
    assert done.returncode == 0, done.stderr
    first, second = done.lines_of(0), done.lines_of(1)
    assert first[0] == "rank 0 of 2, local 0 of 2, cpu gloo ddp attempt 0, sum 3"
    assert second[0] == "rank 1 of 2, local 1 of 2, cpu gloo ddp attempt 0, sum 3"
    (zero,), (one,) = drawn(first[1]), drawn(second[1])
    assert zero[0] == "7"
    assert all(a != b for a, b in zip(zero, one, strict=True)), (zero, one)
    again = train("--num-procs", "2", PROGRAM, "end", timeout=100)
    assert [again.lines_of(rank)[1] for rank in (0, 1)] == [first[1], second[1]], (
        "the same seeds each time"
    )


def test_torchrun_is_as_good_a_launcher(clean_env, tmp_path):
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    env = {**clean_env, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, PROGRAM, "end"],
        capture_output=True,
        text=True,
        env=env,
        cwd=tmp_path,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert (
        len(re.findall(r"rank \d of 2, local \d of 2, cpu gloo ddp attempt 0, sum 3", done.stdout))
        == 2
    )


def test_groups_that_follow_each_other_have_nothing_of_each_other_though_a_checkpoint_is_left_open(
    distlaunch, tmp_path
):
    done = distlaunch.train_warm("--num-procs", "2", AGAIN, tmp_path / "c", timeout=100)
    assert done.returncode == 0, done.stderr
    turns = [
        [line for line in done.lines_of(rank) if not line.startswith("distlaunch: ")]
        for rank in (0, 1)
    ]
    assert turns == [TURNS, TURNS]
    assert "after 2 steps" in done.lines_of(0)[-2]


def test_they_have_nothing_of_each_other_under_torchrun_whose_store_outlives_them(
    clean_env, tmp_path
):
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    env = {**clean_env, "OMP_NUM_THREADS": "1"}
    argv = [*torchrun, AGAIN, tmp_path / "c"]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=110)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(TURNS * 2)


def test_a_worker_that_raises_waits_for_nobody(train):
    done = train("--num-procs", "2", PROGRAM, "raise", timeout=100)
    assert done.returncode == 1, done.stderr
    assert "KeyError: 'asked to fail'" in done.stderr
    assert "rank 1 of 2 failed: exit code 1" in done.stderr


def test_a_block_that_ends_with_a_code_waits_for_nobody(train):
    done = train("--num-procs", "2", PROGRAM, "exit", timeout=100)
    assert done.returncode == 3, done.stderr


@pytest.mark.parametrize(("late", "backend"), [(1, "gloo"), (0, "cpu:gloo")])
def test_a_worker_that_ends_before_a_late_one_does_not_wait_for_ever(train, late, backend):
    done = train("--num-procs", "2", PROGRAM, f"late{late}", backend, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "the other has ended" in done.lines_of(late)


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_a_worker_that_leaves_fails_the_others_collective_and_joins_none(train, backend):
    done = train("--num-procs", "2", PROGRAM, "leave", backend, timeout=100)
    assert done.returncode == 1, done.stderr
    assert not any("paired" in line for line in done.lines_of(0))


def test_a_collective_is_given_up_after_the_launchers_timeout(train):
    done = train("--num-procs", "2", "-o", "collective-timeout=2", PROGRAM, "hang", timeout=100)
    assert done.returncode == 1, done.stderr
    [failure] = done.of_type("failure")
    assert failure["diagnosis"]["ranks"] == [1], "the rank that rank 0 waited for"


def test_the_toolkits_errors_end_a_job_with_1_and_are_named_once_at_the_scripts_own_line(
    distlaunch,
):
    early = PROGRAM.with_name("early.py")
    done = distlaunch.train_warm("--num-procs", "2", early, timeout=100)
    assert done.returncode == 1, done.stderr
    report = (done.run_dir / "report.txt").read_text()
    message = "ToolkitError: wrap() needs a process group (hint: call distlaunch.toolkit.init() before it)"
    assert " ".join(report.split()).count(message) == 1
    assert "failed: exit code 1\n  distlaunch.toolkit.toolkit_error.ToolkitError: " in report
    assert f"\n  at early.py:{len(early.read_text().splitlines())} in <module>\n" in report
