"""The real Horovod on CPUs: operations, initialising again, training, failing, and horovodrun's
options."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from tests.facts import mentions
from tests.launcher import PROGRAMS
from tests.ports import free_port

# Building it takes up to a quarter of an hour, once.
pytestmark = pytest.mark.timeout(2400)

FRAMEWORKS = PROGRAMS / "frameworks"
OPS = FRAMEWORKS / "horovod_ops.py"
PATIENCE_S = 200
BATCH = 64
"""Of all workers together."""
# On a busy machine the first worker may be ready long before the last.
PATIENT = ("-x", "HOROVOD_GLOO_TIMEOUT_SECONDS=150")


@pytest.fixture(scope="module")
def python(horovod_python) -> str:
    return horovod_python


@pytest.fixture
def train(horovod_launcher):
    def run(workers: int, *words):
        size = ("--num-procs", str(workers))
        return horovod_launcher.train(
            *size, "--backend", "horovod", *PATIENT, *words, timeout=PATIENCE_S
        )

    return run


def reported(result, workers: int) -> list[dict]:
    """Return the reports of the workers, by rank."""
    assert result.returncode == 0, result.stderr
    return [json.loads(result.lines_of(rank)[-1]) for rank in range(workers)]


def expected(rank: int, size: int) -> dict:
    return {
        **{f"sum {turn}": sum(range(size)) + turn * size for turn in range(3)},
        "of my set": sum(range(size)) if rank else 0,
        "mean": (size - 1) / 2,
        "gathered": [other for other in range(size) for _ in range(other + 1)],
        "from the last": [(size - 1) * 10],
        "object": {"rank": 0},
        "same weights": True,
        "large": size,
        "place": [rank, size, rank, size, 0, 1],
    }


def test_its_operations_and_process_sets_work_also_after_initialising_again(distlaunch, python):
    words = ("--num-procs", "3", "--python", python, "--backend", "horovod", *PATIENT)
    found = reported(distlaunch.train(*words, OPS, timeout=PATIENCE_S), 3)
    assert found == [expected(rank, 3) for rank in range(3)]


def test_workers_that_are_forked_from_a_preloaded_horovod_do_the_same(train):
    result = train(3, OPS)
    assert reported(result, 3) == [expected(rank, 3) for rank in range(3)]
    assert "without preloading" not in result.stderr


def test_where_a_launcher_is_started_on_each_node_that_of_node_0_has_the_store(horovod_launcher):
    place = f"127.0.0.1:{free_port()}"
    words = [
        "--num-nodes",
        "2",
        "--procs-per-node",
        "2",
        "--rendezvous",
        place,
        "--backend",
        "horovod",
        *PATIENT,
    ]
    launchers = [
        horovod_launcher.start(
            ["train", *words, "--node-rank", str(rank), "--log-dir", f"of-{rank}", OPS]
        )
        for rank in (0, 1)
    ]
    results = [each.wait(PATIENCE_S) for each in launchers]
    assert [each.returncode for each in results] == [0, 0], results[0].stderr
    found = [json.loads(results[rank // 2].lines_of(rank)[-1]) for rank in range(4)]
    assert [each["place"] for each in found] == [
        [rank, 4, rank % 2, 2, rank // 2, 2] for rank in range(4)
    ]
    assert [each["large"] for each in found] == [4] * 4


def test_a_script_for_elastic_horovod_runs_with_the_workers_there_are(train):
    result = train(2, FRAMEWORKS / "horovod_elastic.py")
    assert result.returncode == 0, result.stderr
    assert [result.lines_of(rank)[-1] for rank in (0, 1)] == ["batch 4 of 2"] * 2


# --- training


def losses(lines: list[str], name: str = "loss") -> list[float]:
    return [float(line.split()[-1]) for line in lines if line.startswith(name)]


def accuracy(lines: list[str]) -> float:
    [found] = [float(line.split()[-1]) for line in lines if line.startswith("accuracy ")]
    return found


@pytest.fixture(scope="module")
def alone(python) -> list[str]:
    """Return the lines of one process that takes the whole batch, without a launcher."""
    done = subprocess.run(
        [python, FRAMEWORKS / "horovod_digits.py", str(BATCH), "-", "-1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_two_workers_have_the_losses_of_one_process_at_the_same_batch(train, alone):
    result = train(2, FRAMEWORKS / "horovod_digits.py", str(BATCH // 2), "-", "-1")
    assert result.returncode == 0, result.stderr
    assert losses(result.lines_of(0)) == pytest.approx(losses(alone), rel=1e-3, abs=1e-4)
    assert accuracy(result.lines_of(0)) == pytest.approx(accuracy(alone), abs=0.01)
    assert accuracy(alone) > 0.93


def test_after_a_failure_all_connect_anew_at_the_same_port_and_go_on(train, tmp_path, alone):
    words = ("--max-restarts", "1", "--min-uptime", "0", "--master-port", str(free_port()))
    script = (FRAMEWORKS / "horovod_digits.py", str(BATCH // 2), tmp_path / "checkpoint", "4")
    result = train(2, *words, *script)
    assert result.returncode == 0, result.stderr
    assert mentions(result.stderr, "attempt 0", "rank 1: RuntimeError: as it was told to")
    steps = len(losses(alone)) // 8
    logs = [
        (result.run_dir / f"attempt-{attempt}" / "rank-0.log").read_text().splitlines()
        for attempt in (0, 1)
    ]
    assert losses(logs[0])[: 4 * steps] == pytest.approx(
        losses(alone)[: 4 * steps], rel=1e-3, abs=1e-4
    )
    assert losses(logs[1]) == pytest.approx(losses(alone)[4 * steps :], rel=1e-2, abs=2e-3)
    assert accuracy(logs[1]) == pytest.approx(accuracy(alone), abs=0.01)


# --- horovodrun's words


def test_a_command_line_of_horovodrun(distlaunch, python):
    words = [
        "--gloo-timeout-seconds",
        "150",
        "--cycle-time-ms",
        "0.5",
        "--log-level",
        "DEBUG",
        "--output-filename",
        "o",
    ]
    result = distlaunch.run(
        [
            "horovodrun",
            "-np",
            "2",
            "-H",
            "localhost:3",
            "--device",
            "cpu",
            *words,
            python,
            "-u",
            OPS,
        ],
        timeout=PATIENCE_S,
    )
    assert result.returncode == 0, result.stderr
    folders = [distlaunch.work / "o" / "latest" / "attempt-0" / f"rank.{rank}" for rank in (0, 1)]
    shown = [(folder / "stdout").read_text().splitlines() for folder in folders]
    found = [json.loads(line) for lines in shown for line in lines if line.startswith("{")]
    assert found == [expected(rank, 2) for rank in (0, 1)]
    assert all("Using GLOO to perform controller operations" in "\n".join(lines) for lines in shown)


def test_the_build_and_version_of_horovod_are_shown(distlaunch, python):
    result = distlaunch.run(["horovodrun", "--check-build", "--python", python], PATIENCE_S)
    assert (result.returncode, result.stderr) == (0, "")
    assert "[X] PyTorch" in result.stdout
    assert "[ ] MPI" in result.stdout
    version = distlaunch.run(["horovodrun", "-v", "--python", python], PATIENCE_S)
    assert version.stdout == "0.28.1\n"
    result = distlaunch.run(["horovodrun", "-cb", "--python", sys.executable], PATIENCE_S)
    assert result.returncode == 2
    assert mentions(result.stderr, "module horovod")
    assert "pip install --no-build-isolation" in result.stderr


def test_a_machine_whose_name_has_no_address_is_reported(distlaunch, python):
    """Horovod's gloo crashes or aborts, depending on the resolver's answer."""
    words = ["train", "--num-procs", "2", "--backend", "horovod", "--python", python, OPS]
    inside = ["unshare", "--uts", "sh", "-c", 'hostname no-such-name.invalid && exec "$@"', "sh"]
    done = subprocess.run(
        [*inside, sys.executable, "-m", "distlaunch", *words],
        env=distlaunch.env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    if "unshare failed" in done.stderr:
        pytest.skip(f"no name of its own can be had here: {done.stderr}")
    assert done.returncode in (128 + signal.SIGSEGV, 128 + signal.SIGABRT), done.stderr
    assert "`getent hosts $(hostname)`" in " ".join(done.stderr.split())
