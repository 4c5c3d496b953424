"""Places of checkpoints: what a place is called, and manifests that cannot be trusted."""

from __future__ import annotations

import json
import os
import pathlib
import zlib

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from distlaunch.core.errors import ConfigError  # noqa: E402
from distlaunch.toolkit.checkpoint import Checkpoint  # noqa: E402
from distlaunch.toolkit.checkpoint_store import Store, sealed, store_for  # noqa: E402


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
    """Change what a manifest says, and leave its sum as it was."""
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
    assert f"{saved}/step-000000002 is damaged: its manifest cannot be read: " in caplog.text


def test_a_manifest_of_another_checkpoint_is_not_this_one_s(saved):
    (saved / "step-000000002" / "manifest.json").write_bytes((saved / "step-000000001" / "manifest.json").read_bytes())
    with pytest.raises(ValueError, match="is of the checkpoint after 1 steps"):
        store_for(saved).manifest("step-000000002")


def test_another_number_of_workers_is_told_of(saved, caplog):
    checkpoint = Checkpoint(saved, model=nn.Linear(2, 1))
    checkpoint._group.size = 2
    assert checkpoint.resume() == 2
    checkpoint.close()
    assert f"{saved}/step-000000002 was made by 1 worker, and is read by 2" in caplog.text


def test_a_manifest_s_sum_is_of_all_else_that_it_says():
    manifest = {"format": 1, "steps": 3, "files": {"ä": [1, 2]}}
    found = json.loads(sealed(json.dumps(manifest).encode()))
    assert found.pop("crc32") == zlib.crc32(json.dumps(manifest).encode())
    assert found == manifest


def test_what_an_object_store_raises_on_one_worker_is_told_to_all(saved):
    class Odd(type(store_for(saved))):
        def open(self, path):
            raise LookupError("no such bucket")

    store = Odd(str(saved))
    assert isinstance(store, Store)
    assert store.damage("step-000000002", {"a": [1, 2]}) == "a: LookupError: no such bucket"
    with pytest.raises(ValueError, match="LookupError: no such bucket"):
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
def test_a_directory_is_where_it_is_said_to_be(where, root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert store_for(where).root == os.path.normpath(root.replace("HERE", str(tmp_path)))


@pytest.mark.parametrize(
    ("where", "text"),
    [
        (pathlib.Path("s3://bucket/x"), r"s3:/bucket/x: a directory named s3:, or a URL.*as a str \('s3://bucket/x'\)"),
        ("s3:/b", "directory named s3:, or a URL that has lost a slash"),
        ("file://host/a", "three slashes before a path: file:///host/a"),
        ("", "not a path or a URL"),
        ("a\0b", "not a path or a URL"),
        (None, "checkpoints in None: not a path or a URL"),
        (b"a", "not a path or a URL"),
    ],
)
def test_what_is_no_place_is_refused(where, text):
    with pytest.raises(ConfigError, match=text):
        store_for(where)
