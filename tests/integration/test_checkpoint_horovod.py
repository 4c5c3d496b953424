"""Checkpoints of jobs under the real Horovod.

Apart from test_checkpoint.py: files with tests that need Horovod come last.
"""

from __future__ import annotations

import pytest

from tests.integration.test_checkpoint import (
    PROGRAM,
    found,
    steps_of_a_whole_and_a_resumed_job,
)

pytestmark = [pytest.mark.timeout(2400), pytest.mark.usefixtures("this_tree")]


def test_with_the_real_horovod_a_training_goes_on_with_the_same_losses(horovod_launcher, tmp_path):
    """Its optimizer takes no ``set_to_none``, and its step communicates: torch's own way to a state
    fails."""
    program = PROGRAM.parent / "horovod_checkpoint.py"

    def losses(where: str, steps: int, saved: object) -> list[str]:
        words = ("--num-procs", "2", "--backend", "horovod", program, tmp_path / where)
        result = horovod_launcher.train(*words, str(steps), str(saved), timeout=200)
        assert result.returncode == 0, result.stderr
        return sorted(found(r"rank \d step \d loss \S+", result.stdout))

    whole = losses("a", 6, "never")
    assert losses("b", 3, 3) == [line for line in whole if int(line.split()[3]) < 3]
    assert losses("b", 6, "never") == [line for line in whole if int(line.split()[3]) >= 3]
    assert losses("c", 6, "fresh") == whole


def test_with_horovod_each_worker_gets_its_own_buffers_back(horovod_launcher, tmp_path):
    train, words = horovod_launcher.train, ("--backend", "horovod", ())
    whole, resumed = steps_of_a_whole_and_a_resumed_job(train, tmp_path / "c", *words)
    assert len(whole) == 6
    assert resumed == whole
