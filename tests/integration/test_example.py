"""The example of the README trains, is restarted after a failure, and ends as if nothing had
happened."""

from __future__ import annotations

import re
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "scripts" / "examples" / "digits_ddp.py"


def accuracy(output: str) -> str:
    found = re.findall(r"accuracy (\d\.\d{4})", output)
    assert len(found) == 1, f"rank 0 alone prints the accuracy, once:\n{output}"
    return found[0]


def test_training_that_fails_and_is_restarted_ends_with_the_accuracy_of_the_uninterrupted_one(
    distlaunch, tmp_path
):
    plain = distlaunch.train(
        "--num-procs", "2", EXAMPLE, "--checkpoint", tmp_path / "plain.pt", timeout=90
    )
    assert plain.returncode == 0, plain.stderr
    assert float(accuracy(plain.stdout)) >= 0.95

    restarted = distlaunch.train(
        *("--num-procs", "2", "--max-restarts", "1", "--min-uptime", "0"),
        *(EXAMPLE, "--checkpoint", tmp_path / "restarted.pt", "--fail-at-epoch", "4"),
        timeout=90,
    )
    assert restarted.returncode == 0, restarted.stderr
    assert "resuming at epoch 4 (attempt 1)" in restarted.stdout
    assert "asked to fail at epoch 4" in restarted.stderr
    assert accuracy(restarted.stdout) == accuracy(plain.stdout)


def test_without_restarts_the_failure_of_rank_1_ends_the_training_with_its_code(distlaunch):
    failed = distlaunch.train("--num-procs", "2", EXAMPLE, "--fail-at-epoch", "0", timeout=90)
    assert failed.returncode == 1, failed.stderr
    assert "rank 1" in failed.stderr
    assert "RuntimeError: asked to fail at epoch 0" in failed.stderr
