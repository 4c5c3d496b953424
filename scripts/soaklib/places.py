"""A directory or bucket for checkpoints that also holds files of other tools, which must never
change."""

from __future__ import annotations

import os
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FOREIGN = {
    "step-1000/model.safetensors": bytes(range(256)) * 64,
    "step-1000/manifest.json": b'{"made by": "another tool"}',
    "step-notes.txt": b"step 3 looks odd",
    "step-1/trainer_state.json": b"{}",
    "step-1/model-00001-of-00002.safetensors": bytes(1000),
    "step-by-step/index.html": b"<html></html>",
    "aside/notes.txt": b"mine",
    "manifest.json": b"{}",
}
"""Files of other tools, by their paths in the place."""


class Place(ABC):
    """The soak's view of a place for checkpoints, from outside the training."""

    where: str
    """What the workers give a Checkpoint."""
    window_s = 0.4
    """The latest instant of a kill after the start: time for some saves."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Return all files with their contents, by their paths in the place."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Write a file."""

    def begin_round(self, choose: random.Random) -> bool:
        """Set up the faults of a round. Return whether a start may fail because of them."""
        del choose
        return False

    @abstractmethod
    def end_round(self) -> None:
        """Remove the faults."""

    def add_foreign(self) -> None:
        """Write what other tools have."""
        for path, data in FOREIGN.items():
            self.write(path, data)

    def changed(self, files: dict[str, bytes]) -> list[str]:
        """Return which files of other tools are not what they were."""
        return [path for path, data in FOREIGN.items() if files.get(path) != data]

    def damage(self, name: str, files: dict[str, bytes], choose: random.Random) -> None:
        """Change one bit of one file of a checkpoint."""
        path = choose.choice(sorted(each for each in files if each.startswith(f"{name}/")))
        content = bytearray(files[path])
        content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
        self.write(path, bytes(content))


class Directory(Place):
    """A directory, or the same one as an object store (``local://``)."""

    def __init__(self, path: str, *, url: bool) -> None:
        self._root = Path(path)
        self.where = f"local://{path}" if url else path

    def end_round(self) -> None:
        """Do nothing: a directory has no faults."""

    def files(self) -> dict[str, bytes]:
        """Read all of them."""
        found = (path for path in self._root.rglob("*") if path.is_file())
        return {str(path.relative_to(self._root)): path.read_bytes() for path in found}

    def write(self, path: str, data: bytes) -> None:
        """Write it, and make its directory."""
        file = self._root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


class Bucket(Place):
    """A bucket of a server that is a process of its own, behind a proxy that fails now and then."""

    where = "s3://bucket/run"
    window_s = 4.0
    _FAULTS = (
        *(
            ("GET", MANIFEST),
            ("GET", ".distcp"),
            ("GET", ".metadata"),
            ("GET", "list-type"),
            ("GET", "owner.json"),
        ),
        *(
            ("PUT", MANIFEST),
            ("PUT", ".distcp"),
            ("PUT", ".metadata"),
            ("HEAD", ""),
            ("DELETE", ""),
            ("POST", ""),
        ),
    )
    """Methods of requests, and parts of their paths."""

    def __init__(self, served: Any, client: Any, fault: Any) -> None:
        """Use a server and the class of its faults, both of tests/s3.py, and boto3's client."""
        self._served, self._client, self._fault = served, client, fault

    def files(self) -> dict[str, bytes]:
        """Read all of them."""
        found = {}
        for page in self._client.get_paginator("list_objects_v2").paginate(
            Bucket="bucket", Prefix="run/"
        ):
            for each in page.get("Contents", ()):
                body = self._client.get_object(Bucket="bucket", Key=each["Key"])["Body"].read()
                found[each["Key"].removeprefix("run/")] = body
        return found

    def write(self, path: str, data: bytes) -> None:
        """Write an object."""
        self._client.put_object(Bucket="bucket", Key=f"run/{path}", Body=data)

    def begin_round(self, choose: random.Random) -> bool:
        """Make one to three kinds of requests fail: a few times, so that clients try again, or often."""
        lasting = False
        for method, part in choose.sample(self._FAULTS, choose.randint(1, 3)):
            times = choose.choice([1, 2, 3, 200])
            lasting = lasting or times == 200
            status = choose.choice([500, 503])
            self._served.faults.append(self._fault(method, part, status=status, times=times))
        return lasting

    def end_round(self) -> None:
        """Let all requests pass."""
        self._served.faults.clear()
        self._served.requests.clear()


@contextmanager
def bucket() -> Iterator[Bucket]:
    """Start a server, and have the workers, which are forked, find it by the environment."""
    import boto3
    import botocore.retryhandler

    from tests.s3 import Fault, s3_server

    # a client tries as often as ever, but does not wait up to 16 s in between
    botocore.retryhandler.delay_exponential = lambda **_: 0.05
    with s3_server() as served:
        os.environ.update(
            AWS_ENDPOINT_URL=served.url,
            AWS_ACCESS_KEY_ID="test",
            AWS_SECRET_ACCESS_KEY="test",  # noqa: S106 - the server takes any
            AWS_DEFAULT_REGION="us-east-1",
        )
        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        yield Bucket(served, client, Fault)
