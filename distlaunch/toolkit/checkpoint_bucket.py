"""Layer toolkit: checkpoints at a URL that fsspec understands: ``s3://bucket/run``, ``gs://…``, ``memory://…``."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from torch import distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.checkpoint_store import MANIFEST, CheckpointError, Store, Summed, name_of, sealed

_OWNER = "owner.json"


class Bucket(Store):
    """An object store has no locks: the job that came last owns the place, and one before it fails at its next save."""

    def __init__(self, root: str) -> None:
        self.root = root
        scheme = root.partition("://")[0]
        if not scheme:
            raise ConfigError(f"checkpoints in {root}: no scheme before ://: give a URL, as s3://bucket/run")
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]

            self._fs, self._path = url_to_fs(root)
        except ImportError as error:
            package = "fsspec" if error.name == "fsspec" else {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}.get(scheme)
            hint = f"pip install {package}" if package else str(error)
            raise ConfigError(f"checkpoints in {root}: {hint}") from error
        except Exception as error:
            raise ConfigError(f"checkpoints in {root}: {_told(error)}") from error
        self._path = self._path.rstrip("/")
        self._mark = ""

    def claim(self) -> None:
        """Own the place, and remove checkpoints that have no manifest."""
        if self.root.startswith("memory://") and dist.is_initialized() and (size := dist.get_world_size()) > 1:
            raise ConfigError(
                f"checkpoints in {self.root}: memory:// is of one process, and the job has {size} workers"
            )
        self._mark = os.urandom(8).hex()
        owner = {"mark": self._mark, "job": os.environ.get("DISTLAUNCH_JOB_ID"), "pid": os.getpid()}
        try:
            self._fs.makedirs(self._path, exist_ok=True)
            self.write(_OWNER, json.dumps(owner).encode())
            whole = set(self.listed())
            for name in self._all():
                if name.startswith("step-") and name not in whole:
                    self.remove(name)
        except Exception as error:
            raise ConfigError(f"checkpoints in {self.root}: {_told(error)}: not a place to write to") from error

    def check_claim(self) -> None:
        """See who owns the place now."""
        if not self.sees(self._mark):
            raise CheckpointError(f"checkpoints in {self.root}: another job has begun to save there")

    def mark(self) -> str:
        """Give the owner's mark."""
        return self._mark

    def sees(self, mark: str) -> bool:
        """Read who owns it."""
        with suppress(OSError, ValueError, KeyError), self.open(_OWNER) as file:
            return bool(json.loads(file.read())["mark"] == mark)
        return False

    def release(self) -> None:
        """Leave the mark: who comes overwrites it."""

    def listed(self) -> list[str]:
        """List folders with a manifest."""
        return [name for name in self._all() if self._is_there(f"{name}/{MANIFEST}")]

    def _is_there(self, path: str) -> bool:
        """Tell it, or raise what has gone wrong: fsspec's own ``exists`` says no then, and no means half-written."""
        try:
            self._fs.info(f"{self._path}/{path}")
        except (FileNotFoundError, NotADirectoryError):  # the latter of what is beside checkpoints, as the owner's mark
            return False
        return True

    def _all(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in found]

    def open(self, path: str) -> BinaryIO:
        """Open for reading."""
        file: BinaryIO = self._fs.open(f"{self._path}/{path}", "rb")
        return file

    def write(self, path: str, data: bytes) -> None:
        """Write an object."""
        with self._fs.open(f"{self._path}/{path}", "wb") as file:
            file.write(data)

    def name(self, steps: int) -> str:
        """Add the mark, so that no two jobs write to one name, and a failing one removes nothing but its own."""
        return f"{name_of(steps)}.{self._mark}"

    def commit(self, temporary: str, name: str, manifest: bytes) -> None:
        """Write the manifest, the mark of a whole checkpoint."""
        self.write(f"{name}/{MANIFEST}", sealed(manifest))

    def remove(self, name: str) -> None:
        """Remove the manifest first."""
        with suppress(OSError):
            if self._is_there(manifest := f"{name}/{MANIFEST}"):
                self._fs.rm(f"{self._path}/{manifest}")
            self._fs.rm(f"{self._path}/{name}", recursive=True)

    def set_aside(self, name: str) -> None:
        """Copy under another name, and remove: there is no other way."""
        self._fs.mv(f"{self._path}/{name}", f"{self._path}/aside-{name}-{os.urandom(4).hex()}", recursive=True)

    def writer(self, folder: str) -> FileSystemWriter:
        """Write through fsspec."""
        writer = FileSystemWriter(folder, sync_files=False)
        writer.fs = _Objects(self._fs)  # type: ignore[assignment]
        writer.path = f"{self._path}/{folder}"
        return writer

    def reader(self, folder: str) -> FileSystemReader:
        """Read through fsspec."""
        reader = FileSystemReader(folder)
        reader.fs = _Objects(self._fs)  # type: ignore[assignment]
        reader.path = f"{self._path}/{folder}"
        return reader


def _told(error: Exception) -> str:
    """Say what a package of fsspec's raises, which is anything, at times without a word."""
    return f"{type(error).__name__}: {error}" if str(error) else f"{type(error).__name__}"


class _Objects(FileSystemBase):
    """What torch asks of a file system."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs
        self.sums: dict[str, list[int]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        if "w" not in mode:
            with self._fs.open(path, mode) as stream:
                yield stream
            return
        with Summed(self._fs.open(path, mode), self.sums, os.path.basename(path), sync=False) as summed:
            yield summed

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{path}/{suffix}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._fs.mv(path, new_path)
        self.sums[os.path.basename(new_path)] = self.sums.pop(os.path.basename(path))

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self._fs.makedirs(path, exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        del checkpoint_id
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return bool(self._fs.exists(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._fs.rm(path)
