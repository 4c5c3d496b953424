"""A real script of Accelerate under the backend."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.facts import mentions
from tests.launcher import TRAINING

# Accelerate takes some 5 s of processor to be imported by each of the workers.
pytestmark = pytest.mark.timeout(480)

PROGRAMS = Path(__file__).parents[1] / "programs" / "frameworks"
CONFIG = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_CPU
downcast_bf16: 'no'
mixed_precision: {precision}
num_machines: 1
num_processes: {processes}
use_cpu: true
"""


def reported(result) -> list[dict]:
    """Return the reports of the workers, of a job that went well."""
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [
        line
        for rank in (0, 1)
        if (result.run_dir / "attempt-0" / f"rank-{rank}.log").exists()
        for line in result.lines_of(rank)
    ]
    return [json.loads(line.removeprefix("told ")) for line in lines if line.startswith("told ")]


def train(distlaunch, *words: str, workers: int = 2, warm: bool = True):
    of_start = ["--preload", f"accelerate,{TRAINING},sklearn.datasets"] if warm else []
    command = ["train", "--num-procs", str(workers), "--format", "plain", *of_start]
    command += ["--backend", "accelerate", *words]
    return distlaunch.run([*command, PROGRAMS / "accelerate_digits.py"], timeout=220)


def test_two_workers_have_the_losses_of_one_at_the_same_global_batch(distlaunch):
    (alone,) = reported(train(distlaunch, workers=1))
    both = reported(train(distlaunch))
    assert alone["processes"] == 1
    assert [worker["processes"] for worker in both] == [2, 2]
    assert [worker["precision"] for worker in both] == ["no", "no"]
    assert (
        both[0]["losses"] == both[1]["losses"] == pytest.approx(alone["losses"], rel=1e-4, abs=1e-6)
    )
    assert alone["losses"][-1] < alone["losses"][0] / 2


def test_a_configuration_decides_precision_and_the_launcher_how_many(distlaunch):
    (distlaunch.work / "conf.yaml").write_text(CONFIG.format(precision="bf16", processes=8))
    result = train(distlaunch, "-o", "config=conf.yaml", warm=False)
    workers = reported(result)
    assert [(worker["processes"], worker["precision"], worker["type"]) for worker in workers] == [
        (2, "bf16", "MULTI_CPU")
    ] * 2
    assert mentions(
        result.stderr, "conf.yaml", "num_processes: 8", "not used", "2 workers", "1 node"
    )


def test_an_option_wins_over_the_configuration(distlaunch):
    (distlaunch.work / "conf.yaml").write_text(CONFIG.format(precision="bf16", processes=2))
    result = train(distlaunch, "-o", "config=conf.yaml", "-o", "mixed-precision=no")
    assert {worker["precision"] for worker in reported(result)} == {"no"}
    assert "num_processes" not in result.stderr


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (CONFIG.format(precision="bf61", processes=2), "conf.yaml:5: mixed_precision 'bf61'"),
        (
            "distributed_type: MULTI_CPU\n  use_cpu: true\n",
            "conf.yaml:2: not YAML: mapping values are not allowed here",
        ),
        (None, "-o config=conf.yaml: No such file or directory"),
    ],
)
def test_a_configuration_that_is_not_right_ends_it_before_anything_starts(distlaunch, text, why):
    if text is not None:
        (distlaunch.work / "conf.yaml").write_text(text)
    result = train(distlaunch, "-o", "config=conf.yaml")
    assert result.returncode == 2
    assert result.stderr.startswith("distlaunch: error: ")
    assert why in result.stderr
    assert result.run_dir is None


def test_a_configuration_of_deepspeed_that_it_names_is_looked_at_before_anything_starts(distlaunch):
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: conf/ds.json\n"
    (distlaunch.work / "conf.yaml").write_text(text)
    named = f"{distlaunch.work}/conf.yaml:3: deepspeed_config_file: conf/ds.json: "
    missing = train(distlaunch, "-o", "config=conf.yaml")
    assert (missing.returncode, missing.run_dir) == (2, None)
    assert missing.stderr.startswith(f"distlaunch: error: {named}")
    (distlaunch.work / "conf").mkdir()
    (distlaunch.work / "conf" / "ds.json").write_text("{")
    malformed = train(distlaunch, "-o", "config=conf.yaml")
    assert (malformed.returncode, malformed.run_dir) == (2, None)
    assert malformed.stderr.startswith(f"distlaunch: error: {named}not JSON: ")
