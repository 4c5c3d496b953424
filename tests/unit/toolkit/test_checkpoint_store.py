"""Locations of checkpoints, and manifests that cannot be trusted."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import socket
import zlib

import pytest

from tests.facts import mentions

torch = pytest.importorskip("torch")

from torch import nn

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.checkpoint.checkpoint import Checkpoint
from distlaunch.toolkit.checkpoint.choose_storage import store_for
from distlaunch.toolkit.checkpoint.storage import (
    CheckpointError,
    ReadError,
    Store,
    sealed,
    steps_of,
)


@pytest.fixture
def saved(tmp_path):
    """Make a directory with two checkpoints."""
    checkpoint = Checkpoint(tmp_path, model=nn.Linear(2, 1), every=1)
    checkpoint.step(0)
    checkpoint.step(1)
    checkpoint.close()
    return tmp_path


def resume(where):
    checkpoint = Checkpoint(where, model=nn.Linear(2, 1))
    try:
        return checkpoint.resume()
    finally:
        checkpoint.close()


def edit(**changes):
    """Change a manifest, but not its checksum."""
    return lambda data: json.dumps({**json.loads(data), **changes}).encode()


def without_a_file(data):
    manifest = json.loads(data)
    del manifest["files"]["__0_0.distcp"]
    return json.dumps(manifest).encode()


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: data.replace(b"world_size", b"wopld_size"),
        edit(world_size="x"),
        edit(world_size=None),
        edit(files={".metadata": None}),
        edit(files={".metadata": []}),
        edit(files={".metadata": {}}),
        edit(files={}),
        edit(files=None),
        edit(steps=77),
        edit(crc32=None),
        without_a_file,
        lambda data: b"[" * 100_000,
        lambda data: b"[]",
        lambda data: b"\xff",
    ],
    ids=lambda _: "",
)
def test_a_manifest_that_is_not_what_was_written_counts_as_damaged(saved, caplog, harm):
    manifest = saved / "step-000000002" / "manifest.json"
    manifest.write_bytes(harm(manifest.read_bytes()))
    assert resume(saved) == 1
    assert mentions(caplog.text, f"{saved}/step-000000002", "damaged", "manifest")


def test_a_copy_without_its_manifest_is_reported_to_miss_it(saved, caplog):
    (saved / "step-000000002" / "manifest.json").unlink()
    assert resume(saved) == 1
    assert f"{saved}/step-000000002 is damaged: manifest.json is missing; it is" in caplog.text


def test_a_manifest_of_another_checkpoint_is_not_this_one_s(saved):
    (saved / "step-000000002" / "manifest.json").write_bytes(
        (saved / "step-000000001" / "manifest.json").read_bytes()
    )
    with pytest.raises(ValueError, match="after 1 steps"):
        store_for(saved).manifest("step-000000002")


def test_another_number_of_workers_is_reported(saved, caplog):
    checkpoint = Checkpoint(saved, model=nn.Linear(2, 1))
    checkpoint._group.size = 2
    assert checkpoint.resume() == 2
    checkpoint.close()
    assert mentions(caplog.text, f"{saved}/step-000000002", "1 worker", "2")


def test_the_checksum_of_a_manifest_covers_the_rest_of_it():
    manifest = {"format": 1, "steps": 3, "files": {"ä": [1, 2]}}
    found = json.loads(sealed(json.dumps(manifest).encode()))
    assert found.pop("crc32") == zlib.crc32(json.dumps(manifest).encode())
    assert found == manifest


def test_an_error_of_an_object_store_is_an_error_of_reading_and_no_damage(saved, monkeypatch):
    monkeypatch.setattr("distlaunch.toolkit.checkpoint.storage._RETRIES_S", (0.0,))

    class Odd(type(store_for(saved))):
        def open(self, path):
            raise LookupError("no such bucket")

    store = Odd(str(saved))
    assert isinstance(store, Store)
    with pytest.raises(
        ReadError,
        match=rf"{saved}/step-000000002/a .*: LookupError: no such bucket",
    ):
        store.damage("step-000000002", {"a": [1, 2]})
    with pytest.raises(ReadError, match="LookupError: no such bucket"):
        store.manifest("step-000000002")


@pytest.mark.parametrize(
    ("where", "root"),
    [
        ("file://localhost/tmp/x", "/tmp/x"),
        ("file:///a%20b", "/a b"),
        ("/a%20b/../c", "/a%20b/../c"),
        ("~/x", "/home/me/x"),
        ("./s3:/x", "HERE/s3:/x"),
        ("a", "HERE/a"),
    ],
)
def test_a_directory_is_at_the_given_place(where, root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert store_for(where).root == os.path.normpath(root.replace("HERE", str(tmp_path)))


@pytest.mark.parametrize(
    ("where", "text"),
    [
        (
            pathlib.Path("s3://bucket/x"),
            r"s3:/bucket/x: a directory named s3:, or a URL.*as a str \('s3://bucket/x'\)",
        ),
        ("s3:/b", "directory named s3:, or a URL that has lost a slash"),
        ("file://host/a", "three slashes before a path: file:///host/a"),
        ("", "not a path or a URL"),
        ("a\0b", "not a path or a URL"),
        (None, "checkpoints in None: not a path or a URL"),
        (b"a", "not a path or a URL"),
    ],
)
def test_an_invalid_location_is_refused(where, text):
    with pytest.raises(ConfigError, match=text):
        store_for(where)


# --- what is ours, and what is somebody else's


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("step-000000005", 5),
        ("step-1234567890", 1234567890),
        ("step-000000005.0123456789abcdef", 5),
        ("step-5", -1),
        ("step-0000000005", -1),
        ("step-000000005.safetensors", -1),
        ("step-by-step-guide", -1),
        ("aside-step-000000005", -1),
    ],
)
def test_only_exactly_the_names_that_a_save_gives_are_checkpoints(name, steps):
    assert steps_of(name) == steps


def foreign(where):
    """Write files of other tools and people. Return the content of each."""
    texts = {
        "step-1/model.safetensors": "weights",
        "step-5/.metadata": "another tool's",
        "step-000000500/model.safetensors": "weights",
        "step-000000900/manifest.json": json.dumps({"weights": ["a"]}),
        "step-000000900/__0_0.distcp": "shard",
        "step-by-step-guide/index.html": "guide",
        "step-notes.txt": "notes",
        ".saving-mine/a": "a",
        ".saving-step-000000003-0123abcd/notes.txt": "n",
    }
    for name, text in texts.items():
        path = where / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    return texts


def test_foreign_files_are_left_alone_and_named_once(tmp_path, caplog):
    texts = foreign(tmp_path)
    for _ in range(2):
        checkpoint = Checkpoint(tmp_path, model=nn.Linear(2, 1), every=1, keep=1)
        start = checkpoint.resume()
        for step in range(start, start + 3):
            checkpoint.step(step)
        checkpoint.close()
    assert {name: (tmp_path / name).read_text() for name in texts} == texts
    assert sorted(path.name for path in tmp_path.glob("step-00000000*")) == ["step-000000006"]
    reported = [record.message for record in caplog.records if "left alone" in record.message]
    assert len(reported) == 2  # once for each Checkpoint
    assert (
        "step-000000500, step-000000900, step-1, step-5, step-by-step-guide and 1 more"
        in reported[0]
    )


def test_a_checkpoint_with_somebody_s_file_in_it_is_resumed_and_never_removed(saved, caplog):
    (saved / "step-000000002" / "notes.txt").write_text("the best one")
    checkpoint = Checkpoint(saved, model=nn.Linear(2, 1), every=1, keep=1)
    assert checkpoint.resume() == 2
    checkpoint.step(2)
    checkpoint.close()
    assert (saved / "step-000000002" / "notes.txt").read_text() == "the best one"
    assert mentions(caplog.text, "step-000000002 stays", "files")
    assert not (saved / "step-000000001").exists()


def test_half_written_saves_are_swept_and_that_is_logged(saved, caplog):
    caplog.set_level("INFO", "distlaunch.checkpoint")
    half = saved / ".saving-step-000000003-0123abcd"
    half.mkdir()
    (half / "__0_0.distcp").write_text("half")
    assert resume(saved) == 2
    assert not half.exists()
    assert mentions(caplog.text, f"removed {half}")


# --- what cannot be read is not damaged


@pytest.mark.parametrize(
    "number", [errno.EMFILE, errno.ESTALE, errno.EACCES, errno.EIO, errno.ENOMEM, errno.ETIMEDOUT]
)
@pytest.mark.parametrize("file", ["manifest.json", "__0_0.distcp"])
def test_an_error_of_reading_sets_nothing_aside_and_names_file_host_and_way_out(
    saved, monkeypatch, number, file
):
    store = type(store_for(saved))
    real, tries = store.open, []

    def failing(self, path):
        if path == f"step-000000002/{file}":
            tries.append(path)
            raise OSError(number, os.strerror(number))
        return real(self, path)

    monkeypatch.setattr("distlaunch.toolkit.checkpoint.storage._RETRIES_S", (0.0, 0.0))
    monkeypatch.setattr(store, "open", failing)
    with pytest.raises(CheckpointError) as raised:
        resume(saved)
    text = raised.value.message
    assert mentions(
        text, f"{saved}/step-000000002/{file}", socket.gethostname(), os.strerror(number)
    )
    assert mentions(text, "resume(steps=N)", "1")
    assert len(tries) >= 3
    monkeypatch.undo()
    assert resume(saved) == 2


def test_an_error_of_reading_that_passes_is_not_noticed(saved, monkeypatch):
    store = type(store_for(saved))
    real, errors = store.open, [OSError(errno.ESTALE, "stale"), TimeoutError()]

    def failing_at_first(self, path):
        if path.endswith("distcp") and errors:
            raise errors.pop()
        return real(self, path)

    monkeypatch.setattr("distlaunch.toolkit.checkpoint.storage._RETRIES_S", (0.0, 0.0))
    monkeypatch.setattr(store, "open", failing_at_first)
    assert resume(saved) == 2
    assert errors == []


@pytest.mark.parametrize(
    "content", [{"steps": 2}, {"steps": 2, "files": {}, "world_size": 0}, {"steps": "2"}]
)
def test_a_manifest_with_a_right_seal_and_other_content_is_damaged(saved, caplog, content):
    manifest = saved / "step-000000002" / "manifest.json"
    manifest.write_bytes(sealed(json.dumps({"format": 1, "files": None, **content}).encode()))
    assert resume(saved) == 1
    assert mentions(caplog.text, "step-000000002", "damaged", "manifest")


def test_a_step_that_does_not_fit_in_a_name_is_refused(saved):
    checkpoint = Checkpoint(saved, model=nn.Linear(2, 1))
    checkpoint.resume()
    with pytest.raises(ConfigError, match="whole number"):
        checkpoint.save(10**18)
    checkpoint.close()


def test_saving_a_step_again_is_refused(saved, caplog):
    checkpoint = Checkpoint(saved, model=nn.Linear(2, 1))
    checkpoint.resume()
    checkpoint.save(1)
    checkpoint.close()
    assert mentions(caplog.text, "step 1", "already", f"{saved}/step-000000002")


def test_a_directory_that_cannot_be_flushed_after_the_rename_has_the_checkpoint_and_that_is_reported(
    saved, caplog, monkeypatch
):
    from distlaunch.toolkit.checkpoint import directory as checkpoint_folder

    real = checkpoint_folder._sync_directory

    def failing(directory):
        if directory == str(saved):
            raise OSError(errno.EIO, "Input/output error")
        real(directory)

    monkeypatch.setattr(checkpoint_folder, "_sync_directory", failing)
    checkpoint = Checkpoint(saved, model=nn.Linear(2, 1))
    checkpoint.resume()
    checkpoint.save(2)
    checkpoint.close()
    monkeypatch.undo()
    assert mentions(caplog.text, "step-000000003", "flushed", "Input/output error")
    assert resume(saved) == 3


def test_a_newer_one_that_cannot_be_set_aside_is_reported(saved, monkeypatch):
    def failing(self, name):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(type(store_for(saved)), "set_aside", failing)
    checkpoint = Checkpoint(saved, model=nn.Linear(2, 1))
    with pytest.raises(
        CheckpointError,
        match=r"step-000000002 .* newer .* aside",
    ):
        checkpoint.resume(steps=1)
    checkpoint.close()


def test_a_dangling_link_and_a_removed_lock_are_reported_in_words(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=f"symbolic link .* {tmp_path}/gone"):
        Checkpoint(link, model=nn.Linear(2, 1))
    checkpoint = Checkpoint(tmp_path / "runs", model=nn.Linear(2, 1))
    (tmp_path / "runs" / ".lock").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"\.lock .* removed",
    ):
        checkpoint.save(0)
    checkpoint.close()


def test_an_error_without_a_text_names_its_class(saved, monkeypatch):
    def failing(self, path):
        raise OSError

    monkeypatch.setattr("distlaunch.toolkit.checkpoint.storage._RETRIES_S", ())
    monkeypatch.setattr(type(store_for(saved)), "open", failing)
    with pytest.raises(CheckpointError, match=r"manifest.json .*: OSError"):
        resume(saved)


def test_the_target_of_a_symbolic_link_is_never_removed(saved, caplog):
    """A user has moved a checkpoint into an archive, and left a link."""
    archive = saved.with_name("archive")
    archive.mkdir()
    (saved / "step-000000001").rename(archive / "step-000000001")
    (saved / "step-000000001").symlink_to(archive / "step-000000001")
    there = sorted(path.name for path in (archive / "step-000000001").iterdir())
    checkpoint = Checkpoint(saved, model=nn.Linear(2, 1), every=1, keep=1)
    assert checkpoint.resume() == 2
    checkpoint.step(2)
    checkpoint.close()
    assert sorted(path.name for path in (archive / "step-000000001").iterdir()) == there
    assert (saved / "step-000000001").is_symlink()
    assert mentions(caplog.text, "step-000000001 stays", "symbolic link")


def test_a_lock_that_is_a_directory_is_named(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ConfigError, match=r"\.lock: Is a directory"):
        Checkpoint(tmp_path, model=nn.Linear(2, 1))
