"""Checkpoints that an attacker has made or changed."""

from __future__ import annotations

import io
import json
import os
import pickle
import zlib
from contextlib import contextmanager

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from distlaunch.toolkit.checkpoint.archive import Part as FilePart
from distlaunch.toolkit.checkpoint.archive import loaded
from distlaunch.toolkit.checkpoint.checkpoint import Checkpoint
from distlaunch.toolkit.checkpoint.storage import sealed


class Evil:
    """Its unpickling makes a directory."""

    def __init__(self, marker) -> None:
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


class Part:
    """A part of a training with a state."""

    def __init__(self, state=None) -> None:
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def seal(folder) -> None:
    """Make the manifest match the changed files, as an attacker can."""
    files = {}
    for path in folder.iterdir():
        if path.name != "manifest.json":
            data = path.read_bytes()
            files[path.name] = [len(data), zlib.crc32(data)]
    change_manifest(folder, files=files)


def change_manifest(folder, **fields) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["crc32"]
    (folder / "manifest.json").write_bytes(sealed(json.dumps({**manifest, **fields}).encode()))


@contextmanager
def changed_metadata(folder):
    """Yield the metadata to change, then write it and the seal."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    yield metadata
    path.write_bytes(pickle.dumps(metadata))
    seal(folder)


def torch_saved(value, **options) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def loaded_bytes(data):
    """Load the output of torch.save, as a resume does."""
    return loaded(FilePart(io.BytesIO(data), 0, len(data)))


def put_entry(folder, key: str, data: bytes, *, as_bytes: bool = False) -> None:
    """Replace an entry by other data, at the end of its file."""
    with changed_metadata(folder) as metadata:
        index, info = next(
            (index, info) for index, info in metadata.storage_data.items() if index.fqn == key
        )
        file = folder / info.relative_path
        info.offset, info.length = file.stat().st_size, len(data)
        with file.open("ab") as stream:
            stream.write(data)
        if as_bytes:
            metadata.state_dict_metadata[key] = BytesStorageMetadata()
            metadata.storage_data[MetadataIndex(key)] = metadata.storage_data.pop(index)


def put_worker(folder, own) -> None:
    """Replace rank 0's own entry."""
    entry = torch_saved(own)
    put_entry(
        folder, "worker-0", torch_saved(torch.frombuffer(bytearray(entry), dtype=torch.uint8))
    )
    with changed_metadata(folder) as metadata:
        described = metadata.state_dict_metadata["worker-0"]
        described.size = described.chunks[0].sizes = torch.Size([len(entry)])


def save(where, *, model, trust: bool = False, **parts):
    """Save one checkpoint. Return its folder."""
    checkpoint = Checkpoint(where, model=model, trust=trust, **parts)
    try:
        checkpoint.save(0)
    finally:
        checkpoint.close()
    (folder,) = where.glob("step-*")
    return folder


def resume(where, *, model, trust: bool = False, **parts):
    checkpoint = Checkpoint(where, model=model, trust=trust, **parts)
    try:
        return checkpoint.resume()
    finally:
        checkpoint.close()
