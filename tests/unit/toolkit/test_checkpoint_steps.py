from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.checkpoint.checkpoint import Checkpoint
from distlaunch.toolkit.checkpoint.storage import AllDamagedError
from tests.unit.toolkit.training import names


@pytest.fixture
def made(tmp_path):
    """Return several Checkpoints of one directory, made one after the other."""
    opened = []

    def make(**options):
        for each in opened:
            each.close()
        opened.append(Checkpoint(tmp_path, model=nn.Linear(1, 1), **options))
        return opened[-1]

    yield make
    opened[-1].close()


def test_one_is_saved_where_a_multiple_has_been_passed(made, tmp_path):
    checkpoint = made(every=50, keep=9)
    assert checkpoint.resume() == 0
    assert [step for step in range(0, 170, 10) if checkpoint.step(step)] == [50, 100, 150]
    checkpoint.wait()
    assert names(tmp_path) == ["step-000000051", "step-000000101", "step-000000151"]
    checkpoint = made(every=50, keep=9)
    assert checkpoint.resume() == 151
    assert [step for step in range(151, 300, 33) if checkpoint.step(step)] == [217, 250]


def test_a_checkpoint_after_the_last_step_counts(made):
    checkpoint = made(every=50)
    checkpoint.step(90)
    checkpoint.save(100)
    assert not checkpoint.step(110)
    assert checkpoint.step(150)


@pytest.mark.parametrize("method", ["step", "save"])
def test_steps_that_go_back_are_refused(made, tmp_path, method):
    """For example if steps are counted anew in each epoch: the checkpoint with the most steps is
    resumed."""
    checkpoint = made(every=100)
    checkpoint.save(9)
    with pytest.raises(ConfigError, match=r"step 4 after step 9: .* all epochs"):
        getattr(checkpoint, method)(4)
    assert names(tmp_path) == ["step-000000010"]
    checkpoint = made()
    assert checkpoint.resume() == 10
    with pytest.raises(ConfigError, match="step 8 after step 9"):
        getattr(checkpoint, method)(8)


def test_resume_goes_back_and_on_from_there(made, tmp_path):
    checkpoint = made(every=2)
    for step in range(6):
        checkpoint.step(step)
    assert checkpoint.resume(2) == 2
    assert [checkpoint.step(step) for step in (2, 3)] == [False, True]
    checkpoint.wait()
    assert names(tmp_path) == ["step-000000002", "step-000000004"]


def test_after_a_resume_that_has_failed_nothing_is_saved_over_what_is_there(made, tmp_path):
    made().save(9)
    (tmp_path / "step-000000010" / ".metadata").write_bytes(b"")
    checkpoint = made()
    with pytest.raises(AllDamagedError):
        checkpoint.resume()
    with pytest.raises(ConfigError, match="step-000000010"):
        checkpoint.save(0)
