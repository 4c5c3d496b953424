"""Checkpoints on S3: a real server of its own process, and a proxy that injects faults into what it
answers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
import fsspec
import s3fs
from torch import nn

from distlaunch.toolkit.checkpoint import storage
from distlaunch.toolkit.checkpoint.checkpoint import Checkpoint
from distlaunch.toolkit.checkpoint.storage import CheckpointError
from tests.launcher import PROGRAMS
from tests.s3 import Fault, s3_server

ROOT = "s3://bucket/run"
PROGRAM = PROGRAMS / "toolkit" / "s3.py"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def server():
    with s3_server() as served, pytest.MonkeyPatch.context() as environment:
        for name, value in {
            "AWS_ENDPOINT_URL": served.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }.items():
            environment.setenv(name, value)
        environment.setattr(s3fs.S3FileSystem, "retries", 1)
        filesystem().ls("")  # starts fsspec's thread, which stays
        yield served


@pytest.fixture
def s3(server, monkeypatch):
    """Return the server with an empty bucket. Clients of this process and of its children find it
    by the environment."""
    monkeypatch.setattr(storage, "_RETRIES_S", (0.0,))
    server.faults.clear()
    files = filesystem()
    if files.exists("bucket"):
        files.rm("bucket", recursive=True)
    files.mkdir("bucket")
    server.requests.clear()
    yield server
    server.faults.clear()


def filesystem():
    fsspec.filesystem("s3").clear_instance_cache()
    files = fsspec.filesystem("s3")
    files.invalidate_cache()
    return files


def objects(under: str = "bucket") -> dict[str, bytes]:
    files = filesystem()
    return {path: files.cat_file(path) for path in files.find(under)}


def put(texts: dict[str, bytes]) -> None:
    files = filesystem()
    for path, text in texts.items():
        files.pipe_file(path, text)


def train(steps: int, **options) -> int:
    """Save after each step; the weight is the number of steps. Return the first step."""
    fsspec.filesystem("s3").clear_instance_cache()
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


def folders() -> list[str]:
    """List the folders of the location, without the marks of their jobs."""
    return sorted(
        {path.split("/")[2].partition(".")[0] for path in objects("bucket/run")} - {"owner"}
    )


def folder_of(steps: int) -> str:
    (name,) = {
        path.split("/")[2] for path in objects("bucket/run") if f"/step-{steps:09d}." in path
    }
    return name


def damage(steps: int) -> None:
    put({f"bucket/run/{folder_of(steps)}/__0_0.distcp": b"nothing"})


FOREIGN = {
    "bucket/run/step-1000/model.safetensors": b"weights",
    "bucket/run/step-by-step-guide/index.html": b"guide",
    "bucket/run/step-notes.txt": b"notes",
    "bucket/run/step-000000500/model.safetensors": b"weights",
    "bucket/run/step-000000700.0123456789abcdef/model.safetensors": b"weights",
    "bucket/run/other/file": b"other",
}


def test_foreign_objects_under_the_prefix_stay_and_are_named_once(s3, caplog):
    put(FOREIGN)
    Checkpoint(ROOT, model=nn.Linear(2, 1)).close()
    assert train(3, keep=1) == 0
    assert {path: text for path, text in objects().items() if path in FOREIGN} == FOREIGN
    reported = [record.message for record in caplog.records if "left alone" in record.message]
    assert len(reported) == 2  # once for each Checkpoint
    assert "step-1000, step-by-step-guide, step-notes.txt" in reported[0]


def test_a_half_written_one_is_removed_and_that_is_logged(s3, caplog):
    caplog.set_level("INFO", "distlaunch.checkpoint")
    train(2)
    name = folder_of(2)
    filesystem().rm_file(f"bucket/run/{name}/manifest.json")
    assert train(1) == 1
    assert folders() == ["step-000000001"]
    assert f"removed {ROOT}/{name}" in caplog.text


def test_a_damaged_newest_one_is_resumed_past_and_set_aside_once(s3, caplog):
    train(3)
    damage(3)
    assert train(3) == 2
    assert "step-000000003" in caplog.text
    assert "is damaged: __0_0.distcp has 7 bytes" in caplog.text
    assert folders() == [
        "aside-step-000000003",
        "step-000000001",
        "step-000000002",
        "step-000000003",
    ]
    aside = [path for path in objects() if "/aside-" in path]
    assert sorted(path.rpartition("/")[2] for path in aside) == [
        ".metadata",
        "__0_0.distcp",
        "manifest.json",
    ]
    assert train(3) == 3


def test_going_back_sets_newer_ones_aside(s3):
    train(3)
    fsspec.filesystem("s3").clear_instance_cache()
    checkpoint = Checkpoint(ROOT, model=nn.Linear(2, 1))
    assert checkpoint.resume(steps=1) == 1
    checkpoint.close()
    assert folders() == ["aside-step-000000002", "aside-step-000000003", "step-000000001"]


def test_a_copy_that_fails_leaves_no_copy_and_the_next_start_goes_past(s3):
    train(3)
    damage(3)
    before = objects()
    s3.faults.append(Fault("PUT", "aside-", 403, header="x-amz-copy-source"))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"newer .* aside"):
            train(3)
        after = objects()
        assert {path: text for path, text in after.items() if "owner" not in path} == {
            path: text for path, text in before.items() if "owner" not in path
        }
    s3.faults.clear()
    assert train(3) == 2


def test_the_manifest_is_copied_last_and_removed_first(s3):
    train(2)
    damage(2)
    s3.requests.clear()
    assert train(2) == 1
    copies = [
        request for request in s3.requests if request.startswith("PUT ") and "/aside-" in request
    ]
    removals = [
        request
        for request in s3.requests
        if request.startswith("DELETE ") and "/step-000000002." in request
    ]
    assert "manifest.json" in copies[-1]
    assert "manifest.json" in removals[0]
    assert s3.requests.index(copies[-1]) < s3.requests.index(removals[0])


@pytest.mark.parametrize(
    ("status", "file"), [(403, "manifest.json"), (500, "__0_0.distcp"), (503, "manifest.json")]
)
def test_an_error_of_reading_sets_nothing_aside(s3, status, file):
    train(2)
    name, before = folder_of(2), objects()
    s3.faults.append(Fault("GET", f"{name}/{file}", status))
    s3.faults.append(Fault("HEAD", f"{name}/{file}", status))
    with pytest.raises(CheckpointError, match=rf"{name}/{file} .*nothing .* aside"):
        train(2)
    s3.faults.clear()
    assert {path for path in objects() if "owner" not in path} == {
        path for path in before if "owner" not in path
    }
    assert train(2) == 2


def test_one_failed_read_of_the_owner_s_mark_is_not_another_job(s3):
    fsspec.filesystem("s3").clear_instance_cache()
    checkpoint = Checkpoint(ROOT, model=nn.Linear(2, 1))
    s3.faults.append(Fault("GET", "owner.json", 500, times=1))
    checkpoint.save(0)
    s3.faults.append(Fault("GET", "owner.json", 500))
    with pytest.raises(CheckpointError, match=r"owner\.json .* read") as raised:
        checkpoint.save(1)
    assert "another job" not in raised.value.message
    s3.faults.clear()
    checkpoint.close()


def test_two_workers_agree_when_a_damaged_one_cannot_be_set_aside(s3):
    train(2)
    damage(2)
    s3.faults.append(Fault("PUT", "aside-", 403, header="x-amz-copy-source"))
    done = subprocess.run(
        [sys.executable, str(PROGRAM), ROOT],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reported = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["kind"] for each in reported] == ["CheckpointError", "CheckpointError"]
    assert reported[0]["text"] == reported[1]["text"]
