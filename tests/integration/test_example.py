"""The example of the README trains, is restarted after a failure, and ends as if nothing had
happened."""

from __future__ import annotations

import re
from pathlib import Path

from tests.launcher import TRAINING

EXAMPLE = Path(__file__).parents[2] / "scripts" / "examples" / "digits_ddp.py"
PRELOAD = f"{TRAINING},sklearn.datasets"


def accuracy(output: str) -> str:
    found = re.findall(r"accuracy (\d\.\d{4})", output)
    assert len(found) == 1, f"rank 0 alone prints the accuracy, once:\n{output}"
    return found[0]


def test_training_that_fails_and_is_restarted_ends_with_the_accuracy_of_the_uninterrupted_one(
    distlaunch, tmp_path
):
    plain = distlaunch.train_warm(
        *("--num-procs", "2", EXAMPLE, "--checkpoint", tmp_path / "plain.pt"),
        preload=PRELOAD,
        timeout=90,
    )
    assert plain.returncode == 0, plain.stderr
    assert float(accuracy(plain.stdout)) >= 0.95

    restarted = distlaunch.train_warm(
        *("--num-procs", "2", "--max-restarts", "1", "--min-uptime", "0"),
        *(EXAMPLE, "--checkpoint", tmp_path / "restarted.pt", "--fail-at-epoch", "4"),
        preload=PRELOAD,
        timeout=90,
    )
    assert restarted.returncode == 0, restarted.stderr
    assert "resuming at epoch 4 (attempt 1)" in restarted.stdout
    assert "asked to fail at epoch 4" in restarted.stderr
    assert accuracy(restarted.stdout) == accuracy(plain.stdout)
