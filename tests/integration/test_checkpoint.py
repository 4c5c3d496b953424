"""Checkpoints of real jobs."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.facts import mentions
from tests.launcher import TRAINING

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "programs" / "frameworks" / "checkpointed.py"
BLOCK = ROOT / "tests" / "programs" / "toolkit" / "block.py"
SHARDED_PARTS = BLOCK.with_name("sharded_parts.py")
EACH_WORKERS = BLOCK.with_name("each_workers.py")
DIFFERENT_CALLS = BLOCK.with_name("different_calls.py")
OWNED = BLOCK.with_name("owned.py")
RANK_0_ALONE = BLOCK.with_name("rank_0_alone.py")
HOSTILE = BLOCK.with_name("hostile.py")
PART_FAILS = BLOCK.with_name("part_fails_on_one.py")
PRELOAD = f"{TRAINING},torch.distributed.checkpoint"
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("this_tree")]


@pytest.fixture
def train_warm(distlaunch):
    """Return ``distlaunch.train_warm`` with all that these programs import."""
    return functools.partial(distlaunch.train_warm, preload=PRELOAD)


def names(where: Path) -> list[str]:
    """List checkpoints, in a directory like an object store without the marks of their jobs."""
    return sorted(name.partition(".")[0] for name in os.listdir(where) if name.startswith("step-"))


def found(pattern: str, text: str) -> list[str]:
    return re.findall(pattern, text)


def ends(result) -> set[str]:
    """Return the last lines of every rank: state, loss, random numbers."""
    assert result.returncode == 0, result.stderr
    return set(found(r"(rank \d+: loss .*|state after 40 .*)", result.stdout))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> set[str]:
    """Train 40 steps of two workers without a checkpoint."""
    where = tmp_path_factory.mktemp("uninterrupted")
    env = {"PATH": os.environ["PATH"], "HOME": str(where), "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "distlaunch",
        "train",
        *("--num-procs", "2", "--preload", PRELOAD),
        PROGRAM,
        where / "c",
        "--steps",
        "40",
    ]
    return ends(
        subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    )


def test_a_job_whose_worker_is_killed_goes_on_and_is_the_uninterrupted_one_bit_for_bit(
    train_warm, tmp_path, uninterrupted
):
    result = train_warm(
        *("--num-procs", "2", "--max-restarts", "1", "--min-uptime", "0"),
        *(PROGRAM, tmp_path / "c", "--steps", "40", "--every", "7", "--at", "31"),
        timeout=180,
    )
    assert ends(result) == uninterrupted
    assert len(uninterrupted) == 3
    (start,) = found(r"starts at (\d+), attempt 1, epoch 1", result.stdout) or found(
        r"starts at (\d+), attempt 1", result.stdout
    )
    assert int(start) in {21, 28}, "the save after 28 steps may have been cut off by the kill"
    assert names(tmp_path / "c") == ["step-000000021", "step-000000028", "step-000000035"]
    saved = result.of_type("checkpoint")
    assert {event["rank"] for event in saved} == {0}
    assert [event["step"] for event in saved if event["attempt"] == 1][-1] == 35
    assert max(event["step"] for event in saved if event["attempt"] == 0) >= int(start)
    assert all(event["bytes"] > 1000 and event["seconds"] > 0 for event in saved)


def test_a_signal_to_one_worker_saves_all_of_them_together(train_warm, tmp_path, uninterrupted):
    first = train_warm(
        "--num-procs", "2", PROGRAM, tmp_path / "c", "--at", "3", "--signal", "TERM", timeout=180
    )
    assert first.returncode == 143
    stops = found(r"rank (\d) stopped in step (\d+) with 143", first.stdout)
    assert sorted(rank for rank, _ in stops) == ["0", "1"]
    step = int(stops[0][1])
    assert {int(each) for _, each in stops} == {step}
    assert names(tmp_path / "c") == [f"step-{step + 1:09d}"]
    assert mentions(first.stderr, "SIGTERM", "saved", f"{tmp_path}/c/step-{step + 1:09d}")
    steps = max(40, step + 2)
    second = train_warm(
        *("--num-procs", "2", PROGRAM, tmp_path / "c"),
        *("--steps", str(steps), "--at", str(step + 1), "--signal", "USR1"),
        timeout=180,
    )
    assert second.returncode == 0, second.stderr
    assert f"starts at {step + 1}, attempt 0" in second.stdout
    if steps == 40:
        assert ends(second) == uninterrupted
    saved = names(tmp_path / "c")
    assert len(saved) == 2, "USR1 has saved once more, and the training went on"


def test_term_at_the_launcher_saves_within_the_grace(distlaunch, tmp_path):
    running = distlaunch.start(
        [
            *("train", "--num-procs", "2", "--preload", PRELOAD),
            *(PROGRAM, tmp_path / "c", "--steps", "1000000"),
        ]
    )
    while "state after 0 steps" not in running.stdout:
        assert running.process.poll() is None, running.stderr
        select_briefly()
    running.send_signal(signal.SIGTERM)
    result = running.wait(120)
    assert result.returncode == 143
    (stopped,) = set(found(r"stopped in step (\d+) with 143", result.stdout))
    assert names(tmp_path / "c") == [f"step-{int(stopped) + 1:09d}"]


def select_briefly() -> None:
    signal.sigtimedwait([], 0.05)


def test_other_numbers_of_workers_and_fsdp_read_each_others_checkpoints(train_warm, tmp_path):
    """A chain: DDP 2, FSDP 4, FSDP 2, DDP 1; each has exactly the state that the one before it
    left."""
    steps, left = 0, None
    for wrap, workers in (("ddp", 2), ("fsdp", 4), ("fsdp", 2), ("ddp", 1)):
        steps += 4
        words = (PROGRAM, tmp_path / "c", "--wrap", wrap, "--steps", str(steps), "--every", "4")
        result = train_warm("--num-procs", str(workers), *words, timeout=180)
        assert result.returncode == 0, result.stderr
        states = dict(found(r"state after (\d+) steps: (\w+)", result.stdout))
        if left is not None:
            assert states[str(steps - 4)] == left, f"{wrap} with {workers} workers"
        left = states[str(steps)]


def steps_of_a_whole_and_a_resumed_job(train, where: Path, *words: object) -> list[list[str]]:
    """Return the steps of each one from the fourth on."""
    reported = []
    for save in ("3", "0"):
        job = ("--num-procs", "2", *words[:-1], EACH_WORKERS, where, "6", save, *words[-1])
        result = train(*job, timeout=200)
        assert result.returncode == 0, result.stderr
        reported.append(sorted(found(r"rank \d step [345] loss \S+ state \w+", result.stdout)))
    assert "begins 3 with" in result.stdout
    return reported


@pytest.mark.parametrize(
    ("backend", "more"), [("pytorch-ddp", ()), ("pytorch-ddp", ("apart",)), ("fsdp", ())]
)
def test_each_worker_gets_its_own_buffers_and_extra_states_back(
    train_warm, tmp_path, backend, more
):
    whole, resumed = steps_of_a_whole_and_a_resumed_job(
        train_warm, tmp_path / "c", "--backend", backend, more
    )
    assert len(whole) == 6
    assert resumed == whole


def test_averages_of_sharded_weights_and_masters_in_fp32_are_read_by_any_number_of_workers(
    train_warm, tmp_path
):
    """One that copies, one that keeps what it is given, and one that has nothing yet; whole ones
    are sharded again."""
    left = None
    for backend, workers, kinds in (
        ("fsdp", 2, ["copied", "assigned", "late"]),
        ("fsdp", 3, ["copied", "assigned", "late"]),
        ("pytorch-ddp", 1, ["copied", "assigned"]),
        ("fsdp", 2, ["copied", "assigned"]),
    ):
        job = (
            "--num-procs",
            str(workers),
            "--backend",
            backend,
            SHARDED_PARTS,
            tmp_path / "c",
            *kinds,
        )
        result = train_warm(*job, timeout=200)
        assert result.returncode == 0, result.stderr
        reported = [
            dict(found(r"(\w+): (masters .*)", "\n".join(result.lines_of(rank))))
            for rank in range(workers)
        ]
        assert all(each == reported[0] for each in reported)
        assert reported[0]["wrapped"].startswith(reported[0]["learnt"]), (
            "what it had learnt is sharded in fp32"
        )
        if left is not None:
            assert left.startswith(reported[0]["begins"]), f"{backend} with {workers} workers"
        left = reported[0]["ends"]


def test_a_part_that_fails_on_one_worker_alone_fails_the_resume_on_all(train_warm, tmp_path):
    """All workers read the part together, so the others would wait for this one."""
    job = ("--num-procs", "2", "--backend", "fsdp", PART_FAILS, tmp_path / "c")
    result = train_warm(*job, timeout=120)
    assert result.returncode == 0, result.stderr
    error = "rank 1: ValueError: nothing is left of it"
    reported = found(r"rank (\d): (.*)", result.stdout)
    assert sorted(reported) == [(rank, f"{tmp_path}/c/step-000000001: {error}") for rank in "01"]


@pytest.mark.parametrize("backend", ["pytorch-ddp", "fsdp"])
def test_workers_that_make_different_calls_all_get_an_error_with_both_and_nothing_is_saved(
    train_warm, tmp_path, backend
):
    job = ("--num-procs", "2", "--backend", backend, DIFFERENT_CALLS, tmp_path / "c")
    result = train_warm(*job, timeout=200)
    for what, calls in (
        ("steps", "rank 0: save(5); rank 1: save(9)"),
        ("methods", "rank 0: save(20); rank 1: step(20)"),
        ("resumes", "rank 0: resume(3); rank 1: resume()"),
        ("left", "rank 0: save(30); rank 1: close()"),
    ):
        error = f"ConfigError: Checkpoint: the workers have made different calls: {calls}; all have to make the same ones"
        assert f"rank 0 {what}: {error}" in result.stdout
        assert f"rank 1 {what}: {'no error' if what == 'left' else error}" in result.stdout
    lost = f"checkpoints in {tmp_path}/c: rank 0: save(40): another worker has ended, or does not answer ("
    (gone,) = found("rank 0 gone: CheckpointError: (.*)", result.stdout)
    assert gone.startswith(lost)
    assert mentions(gone, "step-000000003", "kept")
    assert names(tmp_path / "c") == ["step-000000003"]


def test_parameters_that_ddp_leaves_to_each_worker_are_refused_at_the_first_save_if_they_are_trained(
    train_warm, tmp_path
):
    result = train_warm("--num-procs", "2", OWNED, tmp_path / "c", "trained", timeout=120)
    assert result.returncode == 0, result.stderr
    reported = dict(found(r"rank (\d): (.*)", result.stdout))
    assert sorted(reported) == ["0", "1"]
    for text in reported.values():
        assert text.startswith(
            f"checkpoint {tmp_path}/c/step-000000001 not written: rank 0: DDP ignores"
        )
        assert (
            ": 1.weight; shard them (FSDP), or take them out of DDP's parameters_to_ignore; "
            in text
        )
    assert not names(tmp_path / "c")
    result = train_warm("--num-procs", "2", OWNED, tmp_path / "c", "frozen", timeout=120)
    assert sorted(found(r"rank (\d): \[\[(\d)", result.stdout)) == [("0", "5"), ("1", "6")]


@pytest.mark.parametrize("backend", ["pytorch-ddp", "fsdp"])
def test_the_end_of_inits_block_waits_for_what_is_being_written(train_warm, tmp_path, backend):
    result = train_warm(
        "--num-procs", "2", "--backend", backend, BLOCK, tmp_path / "c", timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert names(tmp_path / "c") == ["step-000000002", "step-000000004"]


def test_another_model_ends_the_job_with_the_names_that_differ(train_warm, tmp_path):
    assert (
        train_warm(
            "--num-procs", "2", PROGRAM, tmp_path / "c", "--steps", "1", "--every", "1"
        ).returncode
        == 0
    )
    other = train_warm(
        "--num-procs", "2", PROGRAM, tmp_path / "c", "--hidden", "32", "--steps", "2", timeout=120
    )
    assert other.returncode != 0
    assert mentions(
        other.stderr,
        "step-000000001",
        "another model",
        "7 parameters",
        "0.weight",
        "[32, 64]",
        "[64, 64]",
    )


def test_a_second_job_in_the_directory_is_refused_while_the_first_one_runs(
    distlaunch, train_warm, tmp_path
):
    first = distlaunch.start(
        ["train", "--num-procs", "1", PROGRAM, tmp_path / "c", "--steps", "1000000"]
    )
    while "state after 0 steps" not in first.stdout:
        assert first.process.poll() is None, first.stderr
        select_briefly()
    [worker] = first.wait_workers(1)
    os.kill(worker, signal.SIGSTOP)  # its training needs a CPU of its own
    second = train_warm("--num-procs", "1", PROGRAM, tmp_path / "c", timeout=120)
    os.kill(worker, signal.SIGCONT)
    assert second.returncode != 0
    assert mentions(second.stderr, f"{tmp_path}/c", "in use")
    first.send_signal(signal.SIGTERM)
    assert first.wait(120).returncode == 143


def test_through_fsspec_two_workers_save_and_go_on(train_warm, tmp_path):
    """``local://`` makes fsspec write files as in an object store: the manifest last, no rename."""
    pytest.importorskip("fsspec")
    url = f"local://{tmp_path}/c"
    left = None
    for steps in (4, 8):
        result = train_warm(
            "--num-procs", "2", PROGRAM, url, "--steps", str(steps), "--every", "2", timeout=120
        )
        assert result.returncode == 0, result.stderr
        states = dict(found(r"state after (\d+) steps: (\w+)", result.stdout))
        assert left is None or states["4"] == left
        left = states[str(steps)]
    assert names(tmp_path / "c") == ["step-000000004", "step-000000006", "step-000000008"]


def test_kills_at_any_instant_of_a_save_leave_the_last_whole_one(tmp_path):
    """A short form of ``scripts/checkpoint-soak --kills 100``."""
    soak = subprocess.run(
        [sys.executable, ROOT / "scripts" / "checkpoint-soak", "--kills", "4", "--seed", "7"],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert soak.returncode == 0, soak.stdout + soak.stderr
    assert "4 kills, " in soak.stdout


@pytest.mark.parametrize(
    ("whose", "entry"), [("0", "worker-0"), ("1", "worker-1"), ("model", "model._extra_state")]
)
def test_a_refused_load_or_save_on_one_rank_is_an_error_on_all_ranks(
    train_warm, tmp_path, whose, entry
):
    result = train_warm("--num-procs", "2", HOSTILE, tmp_path / "run", whose, timeout=180)
    assert result.returncode == 0, result.stderr
    rank, file = (whose, f"__{whose}_0") if whose != "model" else ("0", "__0_0")
    refused = (
        rf"rank \d: {tmp_path}/run/c/step-000000001: rank {rank}: {file}\.distcp: {entry} needs posix\.mkdir, which is not "
        r"loaded, as it could execute code\. Checkpoint\(…, trust=True\) loads all classes: only for checkpoints"
    )
    assert len(found(refused, result.stdout)) == 2, result.stdout
    at_the_save = r"rank \d: checkpoint .*/d/step-000000001 not written: rank \d: .* is of the class __main__\.Evil, which"
    assert len(found(at_the_save, result.stdout)) == 2, result.stdout
    assert "has loaded" not in result.stdout
    assert sorted(os.listdir(tmp_path / "run")) == ["c", "d"]
    assert os.listdir(tmp_path / "run" / "d") == [".lock"]


def test_a_save_on_rank_0_alone_is_named_while_it_waits(train_warm, tmp_path):
    result = train_warm("--num-procs", "2", RANK_0_ALONE, tmp_path / "c", timeout=180)
    assert result.returncode == 0, result.stderr
    reported = r"rank 0: distlaunch: Checkpoint: rank 0 has called save\(5\) and has waited 0\.5 s for the other workers: each of"
    assert len(found(reported, result.stdout)) == 1, result.stdout
    assert names(tmp_path / "c") == ["step-000000006"]
