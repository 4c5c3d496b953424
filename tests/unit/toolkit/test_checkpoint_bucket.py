"""Checkpoints at a URL: what is whole there, what a killed job leaves, and who owns the place."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
fsspec = pytest.importorskip("fsspec")

from torch import nn  # noqa: E402

from distlaunch.core.errors import ConfigError  # noqa: E402
from distlaunch.toolkit.checkpoint import Checkpoint  # noqa: E402
from distlaunch.toolkit.checkpoint_store import CheckpointError, store_for  # noqa: E402

ROOT = "memory://bucket/run"


@pytest.fixture(autouse=True)
def empty():
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    yield memory
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def train(steps, **options):
    """Have the weight be the number of steps."""
    model = nn.Linear(2, 1)
    checkpoint = Checkpoint(ROOT, model=model, every=1, **options)
    try:
        start = checkpoint.resume()
        assert start == 0 or model.weight.tolist() == [[start, start]]
        for step in range(start, steps):
            nn.init.constant_(model.weight, step + 1)
            checkpoint.step(step)
    finally:
        checkpoint.close()
    return start


def names(memory):
    return sorted(path.rpartition("/")[2] for path in memory.ls("/bucket/run", detail=False))


def test_a_training_goes_on_and_older_ones_are_removed(empty):
    assert train(4, keep=2) == 0
    assert names(empty) == ["owner.json", "step-000000003", "step-000000004"]
    assert train(5, keep=2) == 4
    assert names(empty) == ["owner.json", "step-000000004", "step-000000005"]


def test_one_without_a_manifest_was_never_whole(empty):
    train(3)
    empty.rm("/bucket/run/step-000000003/manifest.json")
    assert train(3) == 2
    assert names(empty) == ["owner.json", "step-000000001", "step-000000002", "step-000000003"]


def test_a_damaged_one_is_skipped_and_set_aside(empty, caplog):
    train(3)
    with empty.open("/bucket/run/step-000000003/__0_0.distcp", "wb") as file:
        file.write(b"nothing")
    assert train(3) == 2
    assert f"{ROOT}/step-000000003 is damaged: __0_0.distcp has 7 bytes" in caplog.text
    aside = [name for name in names(empty) if name.startswith("aside-step-000000003-")]
    assert len(aside) == 1
    assert empty.exists(f"/bucket/run/{aside[0]}/__0_0.distcp")


def test_the_job_that_came_first_cannot_complete_another_one(empty):
    first = Checkpoint(ROOT, model=nn.Linear(2, 1), every=1)
    first.step(0)
    first.wait()
    second = Checkpoint(ROOT, model=nn.Linear(2, 1), every=1)
    with pytest.raises(CheckpointError, match="another job has begun to save there; step-000000001 is whole and kept"):
        first.save(1)
    assert second.resume() == 1
    second.step(1)
    for checkpoint in (first, second):
        checkpoint.close()
    assert names(empty) == ["owner.json", "step-000000001", "step-000000002"]


def test_a_file_url_is_a_directory(tmp_path):
    assert store_for(f"file://{tmp_path}/a").root == f"{tmp_path}/a"
    assert store_for(f"file://{tmp_path}/a").renames


@pytest.mark.parametrize(("url", "text"), [("nowhere://x", "nowhere"), ("gs://bucket/x", "pip install gcsfs")])
def test_a_url_that_nothing_here_reads_is_refused(url, text):
    with pytest.raises(ConfigError, match=text):
        store_for(url)
