"""Layer toolkit: checkpoints in a directory that all nodes share."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.checkpoint_store import MANIFEST, Store, Summed, sealed

_LOCK = ".lock"
_SAVING, _REMOVING, _ASIDE = ".saving-", ".removing-", "aside-"
_held: set[str] = set()
"""What this process has: a lock of POSIX keeps only others out."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}
_WAIT_S = 5.0
"""For the lock of a job that is just ending, and for network file systems that show new files late."""


class Folder(Store):
    """A directory; the lock is POSIX's, which no child inherits and which ends with its process."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._lock = -1
        self._mark = ""

    def claim(self) -> None:
        """Make the directory, lock it, and sweep it."""
        if self.root in _held:
            raise ConfigError(f"checkpoints in {self.root}: this process has another Checkpoint there already")
        try:
            os.makedirs(self.root, exist_ok=True)
            self._lock = os.open(f"{self.root}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"checkpoints in {self.root}: {error.strerror}: not a directory to write to") from error
        self._take_lock()
        _held.add(self.root)
        self._mark = os.urandom(8).hex()
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "job": os.environ.get("DISTLAUNCH_JOB_ID")}
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, json.dumps({**holder, "mark": self._mark}).encode(), 0)
            os.fsync(self._lock)  # without it other nodes see an empty file on NFS, which writes it when it is closed
        except OSError as error:  # a full disk: where it is shared, the others could not be sure of it
            raise ConfigError(f"checkpoints in {self.root}: {error.strerror}") from error
        for name in os.listdir(self.root):
            if name.startswith((_SAVING, _REMOVING)):
                shutil.rmtree(f"{self.root}/{name}", ignore_errors=True)

    def _take_lock(self) -> None:
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return  # names are safe even so: see commit
                if time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                holder = self._holder()
                os.close(self._lock)
                self._lock = -1
                raise ConfigError(
                    f"checkpoints in {self.root}: in use by job {holder.get('job')}, process {holder.get('pid')} on "
                    f"{holder.get('host')}: a directory is for one job at a time"
                ) from error
            return

    def _holder(self) -> dict[str, Any]:
        try:
            found = json.loads(os.pread(self._lock, 4096, 0))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def mark(self) -> str:
        """Give what has been written into the lock file."""
        return self._mark

    def sees(self, mark: str) -> bool:
        """Look until the lock file shows the mark, for some seconds."""
        if self._lock >= 0:  # to open and close the file again would undo the lock
            return self._holder().get("mark") == mark
        deadline = time.monotonic() + _WAIT_S
        while True:
            with suppress(OSError, ValueError, KeyError), open(f"{self.root}/{_LOCK}", "rb") as file:
                if json.loads(file.read())["mark"] == mark:
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)

    def check_claim(self) -> None:
        """See nothing to check where there is a lock."""

    def release(self) -> None:
        """Unlock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            _held.discard(self.root)

    def listed(self) -> list[str]:
        """List all there is."""
        try:
            return os.listdir(self.root)
        except FileNotFoundError:
            return []

    def open(self, path: str) -> BinaryIO:
        """Open for reading."""
        return open(f"{self.root}/{path}", "rb")

    def write(self, path: str, data: bytes) -> None:
        """Write and flush to the disk."""
        with Summed(open(f"{self.root}/{path}", "wb"), {}, path, sync=True) as file:
            file.write(data)

    def folder(self, name: str) -> str:
        """Write under another name, which a job sweeps when it comes."""
        return f"{_SAVING}{name}-{os.urandom(4).hex()}"

    def commit(self, temporary: str, name: str, manifest: bytes) -> None:
        """Write the manifest, and give all of it its name by one rename. Raises FileExistsError if that is taken."""
        self.write(f"{temporary}/{MANIFEST}", sealed(manifest))
        _sync(f"{self.root}/{temporary}")
        os.rename(f"{self.root}/{temporary}", f"{self.root}/{name}")  # fails on a folder that is there and not empty
        _sync(self.root)

    def remove(self, name: str) -> None:
        """Rename, then remove."""
        path = f"{self.root}/{name}"
        with suppress(OSError):
            if not name.startswith(_SAVING):
                path = f"{self.root}/{_REMOVING}{name}-{os.urandom(4).hex()}"
                os.rename(f"{self.root}/{name}", path)
            shutil.rmtree(path, ignore_errors=True)

    def set_aside(self, name: str) -> None:
        """Rename; nothing of ours removes it."""
        os.rename(f"{self.root}/{name}", f"{self.root}/{_ASIDE}{name}-{os.urandom(4).hex()}")

    def writer(self, folder: str) -> FileSystemWriter:
        """Have each file on the disk when it is closed; torch's own flag syncs before it flushes."""
        writer = FileSystemWriter(f"{self.root}/{folder}", sync_files=False)
        writer.fs = _Files()
        return writer

    def reader(self, folder: str) -> FileSystemReader:
        """Read."""
        return FileSystemReader(f"{self.root}/{folder}")


class _Files(FileSystem):
    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, list[int]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        with Summed(open(path, mode), self.sums, os.path.basename(path), sync=True) as stream:  # type: ignore[arg-type]
            yield stream

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[os.path.basename(new_path)] = self.sums.pop(os.path.basename(path))


def _sync(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems have nothing to flush of a directory
            raise
    finally:
        os.close(descriptor)
