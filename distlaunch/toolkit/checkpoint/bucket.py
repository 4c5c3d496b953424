"""Store checkpoints at an fsspec URL: ``s3://bucket/run``, ``gs://…``, ``memory://…``.

An object store has no locks. Each job writes a mark (a random text) to one object; the job whose
mark is there owns the location.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, BinaryIO

from torch import distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.checkpoint.storage import (
    MANIFEST,
    CheckpointError,
    PlaceLostError,
    Store,
    Summed,
    describe,
    log_not_removed,
    name_of,
    only_ours,
    retried,
    sealed,
    steps_of,
)

_OWNER = "owner.json"

log = logging.getLogger("distlaunch.checkpoint")


class Bucket(Store):
    """Checkpoints at a URL. The last job to claim it owns it; an earlier job fails at its next
    save."""

    def __init__(self, root: str) -> None:
        self.root = root
        scheme = root.partition("://")[0]
        if not scheme:
            raise ConfigError(
                f"checkpoints in {root}: no scheme before ://: give a URL, as s3://bucket/run"
            )
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]

            self._fs, self._path = url_to_fs(root)
        except ImportError as error:
            package = (
                "fsspec"
                if error.name == "fsspec"
                else {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}.get(scheme)
            )
            hint = f"pip install {package}" if package else str(error)
            raise ConfigError(f"checkpoints in {root}: {hint}") from error
        except Exception as error:
            raise ConfigError(f"checkpoints in {root}: {describe(error)}") from error
        self._path = self._path.rstrip("/")
        self._mark = ""

    def claim(self) -> None:
        """Write this job's mark, and remove checkpoints without a manifest. Raises ConfigError."""
        if (
            self.root.startswith("memory://")
            and dist.is_initialized()
            and (size := dist.get_world_size()) > 1
        ):
            raise ConfigError(
                f"checkpoints in {self.root}: memory:// is of one process, and the job has {size} "
                "workers"
            )
        self._mark = os.urandom(8).hex()
        owner = {"mark": self._mark, "job": os.environ.get("DISTLAUNCH_JOB_ID"), "pid": os.getpid()}
        try:
            self._fs.makedirs(self._path, exist_ok=True)
            self.write(_OWNER, json.dumps(owner).encode())
            for name in self.listed():
                if self._is_half_written(name):
                    self.remove(name)
        except Exception as error:
            raise ConfigError(
                f"checkpoints in {self.root}: {describe(error)}: not a place to write to"
            ) from error

    def _is_half_written(self, name: str) -> bool:
        """Return whether a job of this format began the checkpoint and did not complete it.

        Raises ReadError.
        """
        # The name of each checkpoint that a job begins ends in ``.`` and the job's mark.
        if steps_of(name) < 0 or "." not in name:
            return False
        try:
            files = retried(lambda: self.files(name), self.where(name))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return MANIFEST not in files and only_ours(files)

    def check_claim(self) -> None:
        """Raise CheckpointError if another job owns the URL, and PlaceLostError if the mark is
        gone."""
        try:
            found = self._read_mark()
        except FileNotFoundError as error:
            raise PlaceLostError(
                f"checkpoints in {self.root}: the place has been emptied meanwhile"
            ) from error
        if found != self._mark:
            raise CheckpointError(
                f"checkpoints in {self.root}: another job has begun to save there"
            )

    def mark(self) -> str:
        """Return the mark of this job."""
        return self._mark

    def sees(self, mark: str) -> bool:
        """Return whether the mark at the URL is ``mark``."""
        try:
            return self._read_mark() == mark
        except FileNotFoundError:
            return False

    def _read_mark(self) -> str | None:
        """Return the mark at the URL. Raises FileNotFoundError if there is none, and ReadError if
        it cannot be read."""
        data = self.read(_OWNER)
        try:
            found = json.loads(data)
        except ValueError:
            return None
        return found.get("mark") if isinstance(found, dict) else None

    def release(self) -> None:
        """Do nothing. The mark stays until the next job overwrites it."""

    def listed(self) -> list[str]:
        """Return the names of all objects and folders at the URL."""
        self._fs.invalidate_cache()
        try:
            return retried(lambda: self._names_in(self._path), f"checkpoints in {self.root}")
        except FileNotFoundError:
            return []

    def files(self, name: str) -> list[str]:
        """Return the names below a name. Raises NotADirectoryError if the name is an object."""
        path = f"{self._path}/{name}"
        found = self._fs.ls(path, detail=False)
        if [str(each).rstrip("/") for each in found] == [path]:
            raise NotADirectoryError(f"{path} is an object")
        return [file for file in self._names_in(path) if file]

    def _names_in(self, path: str) -> list[str]:
        return [
            str(each).rstrip("/").removeprefix(f"{path}").strip("/")
            for each in self._fs.ls(path, detail=False)
        ]

    def is_complete(self, files: Collection[str]) -> bool:
        """Return whether the manifest, which is written last, is there."""
        return MANIFEST in files

    def open(self, path: str) -> BinaryIO:
        """Open an object for reading."""
        file: BinaryIO = self._fs.open(f"{self._path}/{path}", "rb")
        return file

    def write(self, path: str, data: bytes) -> None:
        """Write an object."""
        with self._fs.open(f"{self._path}/{path}", "wb") as file:
            file.write(data)

    def name(self, steps: int) -> str:
        """Return a name that ends in the mark, so that two jobs never write to the same."""
        return f"{name_of(steps)}.{self._mark}"

    def commit(self, temporary: str, name: str, manifest: bytes) -> None:
        """Write the manifest, which makes the checkpoint complete."""
        self.write(f"{name}/{MANIFEST}", sealed(manifest))

    def remove(self, name: str) -> bool:
        """Remove a checkpoint, the manifest first, so that the rest never looks complete.

        Return False, and log the error, if that failed. A folder with other files stays, with True.
        """
        try:
            self._fs.invalidate_cache()
            if not only_ours(files := self.files(name)):
                log.warning(
                    "distlaunch: %s stays: it holds files that are no checkpoint's",
                    self.where(name),
                )
                return True
            self._remove_files(name, files)
            log.info("distlaunch: removed %s", self.where(name))
        except FileNotFoundError:
            return True
        except Exception as error:  # noqa: BLE001 - an object store's package raises whatever it likes
            log_not_removed(self.where(name), error)
            return False
        return True

    def _remove_files(self, name: str, files: Collection[str]) -> None:
        for file in sorted(files, key=lambda file: file != MANIFEST):
            self._fs.rm_file(f"{self._path}/{name}/{file}")
        self._fs.invalidate_cache()
        # In an object store, a folder vanishes with its last object.
        with suppress(FileNotFoundError):
            if not self.files(name):
                self._fs.rm(f"{self._path}/{name}", recursive=True)

    def set_aside(self, name: str) -> None:
        """Copy all objects to another name, then remove them, as an object store cannot rename.

        The manifest is copied last and removed first. The next call continues an interrupted copy.
        Raises OSError if a step fails.
        """
        aside = f"aside-{name}"
        self._fs.invalidate_cache()
        try:
            files = retried(lambda: self.files(name), self.where(name))
            while retried(partial(self._is_taken, aside), self.where(aside)):
                aside = f"{aside}-again"
        except FileNotFoundError as error:
            raise OSError(f"{self.where(name)} is not there any more") from error
        try:
            for file in sorted(files, key=lambda file: file == MANIFEST):
                self._fs.cp_file(f"{self._path}/{name}/{file}", f"{self._path}/{aside}/{file}")
        except Exception as error:
            with suppress(Exception):
                self._remove_files(aside, self.files(aside))
            raise OSError(
                f"{self.where(name)} could not be copied to {aside}: {describe(error)}"
            ) from error
        try:
            self._remove_files(name, files)
        except Exception as error:
            raise OSError(f"{self.where(name)} could not be removed: {describe(error)}") from error
        finally:
            self._fs.invalidate_cache()

    def _is_taken(self, name: str) -> bool:
        """Return whether a complete copy exists."""
        try:
            return MANIFEST in self.files(name)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def writer(self, folder: str) -> FileSystemWriter:
        """Return torch's writer, which writes through fsspec."""
        writer = FileSystemWriter(folder, sync_files=False)
        writer.fs = _Objects(self._fs)  # type: ignore[assignment]
        writer.path = f"{self._path}/{folder}"
        return writer


class _Objects(FileSystemBase):
    """The file system interface that torch's writer uses."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs
        self.sums: dict[str, list[int]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        if "w" not in mode:
            with self._fs.open(path, mode) as stream:
                yield stream
            return
        with Summed(
            self._fs.open(path, mode), self.sums, os.path.basename(path), sync=False
        ) as summed:
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
