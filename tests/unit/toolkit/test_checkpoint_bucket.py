"""Checkpoints at a URL."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")
fsspec = pytest.importorskip("fsspec")

from torch import nn

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.checkpoint.bucket import Bucket
from distlaunch.toolkit.checkpoint.checkpoint import Checkpoint
from distlaunch.toolkit.checkpoint.choose_storage import store_for
from distlaunch.toolkit.checkpoint.directory import Folder
from distlaunch.toolkit.checkpoint.storage import CheckpointError

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
    """Set the weight to the number of steps."""
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
    """List checkpoints, without the marks of their jobs."""
    return sorted(
        path.rpartition("/")[2].partition(".")[0] for path in memory.ls("/bucket/run", detail=False)
    )


def folder(memory, name):
    (found,) = [path for path in memory.ls("/bucket/run", detail=False) if f"/{name}." in path]
    return found


def test_a_training_goes_on_and_older_ones_are_removed(empty):
    assert train(4, keep=2) == 0
    assert names(empty) == ["owner", "step-000000003", "step-000000004"]
    assert train(5, keep=2) == 4
    assert names(empty) == ["owner", "step-000000004", "step-000000005"]


def test_a_checkpoint_that_could_not_be_removed_is_reported_and_removed_after_the_next_save(
    empty, caplog, monkeypatch
):
    train(2)
    remove, failing = empty.rm_file, [True]

    def rm_file(path):
        if failing and path.endswith("manifest.json"):
            raise OSError("slow down")
        remove(path)

    monkeypatch.setattr(type(empty), "rm_file", lambda self, path: rm_file(path))
    model = nn.Linear(2, 1)
    checkpoint = Checkpoint(ROOT, model=model, keep=1)
    checkpoint.resume()
    checkpoint.save(2)
    assert len(names(empty)) == 4
    assert re.search(r"step-000000001\.\w+ .* removed: OSError: slow down", caplog.text)
    failing.clear()
    checkpoint.save(3)
    checkpoint.close()
    assert names(empty) == ["owner", "step-000000004"]


def test_one_without_a_manifest_was_never_whole(empty):
    train(3)
    empty.rm(f"{folder(empty, 'step-000000003')}/manifest.json")
    assert train(3) == 2
    assert names(empty) == ["owner", "step-000000001", "step-000000002", "step-000000003"]


def test_a_damaged_one_is_skipped_and_set_aside(empty, caplog):
    train(3)
    with empty.open(f"{folder(empty, 'step-000000003')}/__0_0.distcp", "wb") as file:
        file.write(b"nothing")
    assert train(3) == 2
    assert re.search(
        rf"{ROOT}/step-000000003\.\w{{16}} is damaged: __0_0.distcp has 7 bytes", caplog.text
    )
    assert empty.exists(f"{folder(empty, 'aside-step-000000003')}/__0_0.distcp")


def test_the_job_that_came_first_cannot_complete_another_one(empty):
    first = Checkpoint(ROOT, model=nn.Linear(2, 1), every=1)
    first.step(0)
    first.wait()
    second = Checkpoint(ROOT, model=nn.Linear(2, 1), every=1)
    with pytest.raises(
        CheckpointError,
        match=r"another job .* step-000000001\..* kept",
    ):
        first.save(1)
    assert second.resume() == 1
    second.step(1)
    for checkpoint in (first, second):
        checkpoint.close()
    assert names(empty) == ["owner", "step-000000001", "step-000000002"]


def test_a_job_that_has_lost_the_place_leaves_the_new_ones_checkpoint_of_the_same_step(empty):
    first = Checkpoint(ROOT, model=nn.Linear(2, 1), keep=1)
    first.save(0)
    second = Checkpoint(ROOT, model=nn.Linear(2, 1), keep=1)
    second.resume()
    second.save(1)
    made = folder(empty, "step-000000002")
    content = {path: empty.cat(path) for path in empty.find(made)}
    with pytest.raises(CheckpointError, match="another job"):
        first.save(1)
    assert {path: empty.cat(path) for path in empty.find(made)} == content
    for checkpoint in (first, second):
        checkpoint.close()
    assert names(empty) == ["owner", "step-000000002"]


def test_a_job_that_loses_the_place_while_it_writes_removes_its_own_part_alone(empty, monkeypatch):
    first = Checkpoint(ROOT, model=nn.Linear(2, 1), keep=1)
    first.save(0)
    others = []

    def losing(store, temporary, name, manifest):
        monkeypatch.undo()
        others.append(second := Checkpoint(ROOT, model=nn.Linear(2, 1), keep=1))
        second.resume()
        second.save(1)
        store.check_claim()

    monkeypatch.setattr(Bucket, "commit", losing)
    with pytest.raises(CheckpointError, match="another job"):
        first.save(1)
    assert names(empty) == ["owner", "step-000000002"]
    assert others[0].resume() == 2
    for checkpoint in (first, *others):
        checkpoint.close()


def test_an_error_of_the_store_when_the_place_is_taken_removes_nothing(empty, monkeypatch):
    train(3)
    real = type(empty).ls

    def failing(self, path, *args, **options):
        if "000000002" in path:
            raise ConnectionResetError("try again")
        return real(self, path, *args, **options)

    monkeypatch.setattr("distlaunch.toolkit.checkpoint.storage._RETRIES_S", ())
    monkeypatch.setattr(type(empty), "ls", failing)
    with pytest.raises(ConfigError, match="try again"):
        Checkpoint(ROOT, model=nn.Linear(2, 1))
    monkeypatch.undo()
    assert names(empty) == ["owner", "step-000000001", "step-000000002", "step-000000003"]


def test_a_file_url_is_a_directory(tmp_path):
    assert store_for(f"file://{tmp_path}/a").root == f"{tmp_path}/a"
    assert isinstance(store_for(f"file://{tmp_path}/a"), Folder)


@pytest.mark.parametrize(
    ("url", "text"), [("nowhere://x", "nowhere"), ("gs://bucket/x", "pip install gcsfs")]
)
def test_a_url_that_nothing_here_reads_is_refused(url, text):
    with pytest.raises(ConfigError, match=text):
        store_for(url)


@pytest.mark.parametrize("url", ["zip:///tmp", "://x"])
def test_a_url_that_cannot_hold_checkpoints_is_refused_in_words(url):
    with pytest.raises(ConfigError, match=f"checkpoints in {url}: [A-Za-z]"):
        store_for(url).claim()


def test_memory_is_of_one_process(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"memory:// .* 2 workers"):
        store_for(ROOT).claim()


def test_an_error_of_a_store_is_reported_even_without_a_text(empty, monkeypatch):
    def cannot(*_, **__):
        raise NotImplementedError

    monkeypatch.setattr(type(empty), "makedirs", cannot)  # as http:// does
    with pytest.raises(ConfigError, match=f"{ROOT}: NotImplementedError"):
        store_for(ROOT).claim()


def test_an_error_while_one_is_set_aside_harms_no_copy_that_was_set_aside_before(
    empty, monkeypatch
):
    monkeypatch.setattr("distlaunch.toolkit.checkpoint.storage._RETRIES_S", ())
    train(2)
    store = store_for(ROOT)
    store._mark = folder(empty, "step-000000002").partition(".")[2]
    name = f"step-000000002.{store._mark}"
    content = {file: empty.cat(f"/bucket/run/{name}/{file}") for file in store.files(name)}
    store.set_aside(name)
    for file, data in content.items():
        empty.pipe_file(f"/bucket/run/{name}/{file}", data)

    def failing(self, path, *args, **options):
        raise TimeoutError("try again")

    monkeypatch.setattr(type(empty), "ls", failing)
    with pytest.raises(CheckpointError, match="try again"):
        store.set_aside(name)
    monkeypatch.undo()
    assert {file: empty.cat(f"/bucket/run/aside-{name}/{file}") for file in content} == content
    store.set_aside(name)
    assert {
        file: empty.cat(f"/bucket/run/aside-{name}-again/{file}") for file in content
    } == content
