"""A real training over hosts with unequal slots, with and without the loss of a host, is as good as
on one machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import faults
from tests.facts import mentions
from tests.launcher import TRAINING

DIGITS = Path(__file__).parents[2] / "scripts" / "examples" / "digits_ddp.py"
UNEQUAL = "n1:2,n2:1,n3:1,n4:2"
EPOCHS, BATCH = 30, 96
"""``BATCH`` is that of all workers together."""
ON_SIX = ("--epochs", str(EPOCHS), "--batch-size", str(BATCH // 6))
PRELOAD = ("--preload", f"{TRAINING},sklearn.datasets")
CHANCE = 0.02
"""By so much two trainings may differ that deal samples out otherwise: 7 of the 360 images."""
pytestmark = pytest.mark.timeout(240)


def accuracy(text):
    [found] = re.findall(r"accuracy (\d\.\d+)", text)
    return float(found)


def epochs(text):
    """Return the trained epochs, in order."""
    return [int(number) for number in re.findall(r"epoch +(\d+)  loss", text)]


@pytest.fixture(scope="module")
def on_one_machine():
    """Return the accuracy of one process without a launcher."""
    done = subprocess.run(
        [sys.executable, DIGITS, "--epochs", str(EPOCHS), "--batch-size", str(BATCH)],
        env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    return accuracy(done.stdout)


def test_a_training_over_unequal_hosts_is_as_good_as_on_one_machine(hosts, on_one_machine):
    words = ("--hosts", UNEQUAL, "--device", "cpu", *PRELOAD, DIGITS, *ON_SIX)
    result = hosts.train(*words, timeout=200, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert epochs(result.stdout) == list(range(EPOCHS))
    assert accuracy(result.stdout) >= on_one_machine - CHANCE


def test_a_training_that_loses_a_host_goes_on_from_its_checkpoint(hosts, on_one_machine):
    elastic = (
        "--hosts",
        UNEQUAL,
        "--num-nodes",
        "3:4",
        "--device",
        "cpu",
        *PRELOAD,
    )
    words = (*elastic, DIGITS, *ON_SIX, "--checkpoint", hosts.work / "checkpoint")
    running = hosts.start(["train", *words], env={"OMP_NUM_THREADS": "1"})
    running.wait_stdout("epoch  4", timeout=100)
    faults.kill_all(hosts, "n4")
    result = running.wait(200)
    assert result.returncode == 0, result.stderr
    assert "node n4 (ranks 4-5) left: " in result.stderr
    assert mentions(result.stderr, "3 of 4")
    assert [event["world_size"] for event in result.of_type("composed")] == [6, 4]
    logs = [
        (result.run_dir / f"attempt-{attempt}" / "rank-0.log").read_text() for attempt in (0, 1)
    ]
    first, second = map(epochs, logs)
    assert 4 <= first[-1] < EPOCHS - 1
    assert f"resuming at epoch {second[0]} (attempt " in logs[1]
    assert second[0] - first[-1] in (
        0,
        1,
    )  # what was said to be done was kept, but for one that was being saved
    assert second == list(range(second[0], EPOCHS))
    assert accuracy(logs[1]) >= on_one_machine - CHANCE
    hosts.assert_clean()
