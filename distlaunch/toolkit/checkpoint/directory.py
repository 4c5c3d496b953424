"""Store checkpoints in a directory that all nodes share."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import socket
import stat
import struct
import time
import weakref
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.checkpoint.storage import (
    MANIFEST,
    CheckpointError,
    NotAFileError,
    PlaceLostError,
    Store,
    Summed,
    describe,
    log_not_removed,
    only_ours,
    retried,
    sealed,
    steps_of,
)

_LOCK = ".lock"
_MAX_LOCK_BYTES = 4096
_SAVING, _REMOVING, _ASIDE = ".saving-", ".removing-", "aside-"
_HALF = re.compile(rf"(?:{re.escape(_SAVING)}|{re.escape(_REMOVING)})(.+)-[0-9a-f]{{8}}")
"""Folders of an interrupted save or removal."""
_held: set[str] = set()
"""Directories locked by this process. Some file systems have only POSIX locks, which do not exclude
another Checkpoint of the same process."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}
_WAIT_S = 5.0
"""How long to wait for the lock of a job that is ending, and for network file systems that show new
files late."""
_LEASE_S = 100.0
"""An NFSv4 server keeps the lock of a dead node until its lease ends, usually 90 s."""
_FULL = {errno.ENOSPC, errno.EDQUOT}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM, *_FULL}
_FLOCK = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)

log = logging.getLogger("distlaunch.checkpoint")


class Folder(Store):
    """Checkpoints in a directory.

    The lock belongs to the open file: a POSIX lock would end as soon as the process opens and
    closes the file again. A forked child closes its copy. A directory that cannot be written can
    still be read.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._lock = -1
        self._mark = ""
        self._real = ""
        self._directory: tuple[int, int] | None = None
        self._unwritable: str | None = None
        _folders.add(self)

    def claim(self) -> None:
        """Create the directory, lock it, and remove what interrupted saves have left. Raises
        ConfigError."""
        real = os.path.realpath(self.root)
        if real in _held:
            raise ConfigError(
                f"checkpoints in {self.root}: this process has another Checkpoint there already"
            )
        if os.path.islink(self.root) and not os.path.exists(self.root):
            raise ConfigError(
                f"checkpoints in {self.root}: a symbolic link to {os.readlink(self.root)}, which "
                "does not exist: "
                "make that directory, or choose another"
            )
        try:
            os.makedirs(self.root, exist_ok=True)
            self._open_lock()
            self._take_lock()
            self._real, self._directory = real, _identity(self.root)
            _held.add(real)
            self._remove_leftovers()  # first, because this may free a full disk
            self._write_mark()
        except OSError as error:
            self.release()
            if error.errno not in _READ_ONLY or not os.path.isdir(self.root):
                what = (
                    f"{_LOCK} is a symbolic link" if error.errno == errno.ELOOP else describe(error)
                )
                if error.errno != errno.ELOOP and os.path.isdir(self.root):
                    what = f"{_LOCK}: {what}"
                raise ConfigError(
                    f"checkpoints in {self.root}: {what}: not a directory to write to"
                ) from error
            self._unwritable = describe(error)
            self._mark = self._names_as_json()
            log.warning(
                "distlaunch: checkpoints in %s can be read, but not saved: %s",
                self.root,
                describe(error),
            )

    def _open_lock(self) -> None:
        # O_NOFOLLOW: the target of a symbolic link would be truncated.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        path = f"{self.root}/{_LOCK}"
        try:
            self._lock = os.open(path, flags, 0o666)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            # An incomplete save may have filled the disk. Without a lock file no job is saving.
            self._remove_leftovers()
            self._lock = os.open(path, flags, 0o666)
        if os.fstat(self._lock).st_nlink > 1 and not self._is_own_lock():
            raise OSError(errno.EMLINK, "a hard link to another file, which would be emptied")

    def _is_own_lock(self) -> bool:
        """Return whether the lock file is empty or has what ``_write_mark`` writes.

        A copy of the directory with hard links (``cp -al``) shares its lock file with the original.
        """
        content = os.pread(self._lock, _MAX_LOCK_BYTES, 0)
        if not content:
            return True
        try:
            found = json.loads(content)
        except ValueError:
            return False
        return isinstance(found, dict) and "mark" in found

    def _remove_leftovers(self) -> None:
        for name in os.listdir(self.root):
            found = _HALF.fullmatch(name)
            if found is not None and steps_of(found[1]) >= 0 and self._remove_files(name):
                log.info("distlaunch: removed %s, which a job left half-written", self.where(name))

    def _write_mark(self) -> None:
        self._mark = os.urandom(8).hex()
        holder = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job": os.environ.get("DISTLAUNCH_JOB_ID"),
        }
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, json.dumps({**holder, "mark": self._mark}).encode(), 0)
        # NFS writes a file when it is closed or synced. Until then other nodes see an empty file.
        os.fsync(self._lock)

    def _names_as_json(self) -> str:
        return json.dumps(self.names())

    def _take_lock(self) -> None:
        begun = time.monotonic()
        while True:
            try:
                _lock_file(self._lock)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return  # ``commit`` never replaces a checkpoint of another job
                holder = self._read_holder()
                wait_s = _LEASE_S if _is_of_a_lost_node(holder) else _WAIT_S
                if time.monotonic() < begun + wait_s:
                    time.sleep(0.1)
                    continue
                os.close(self._lock)
                self._lock = -1
                raise ConfigError(
                    f"checkpoints in {self.root}: in use by job {holder.get('job')}, process "
                    f"{holder.get('pid')} on "
                    f"{holder.get('host')}: a directory is for one job at a time"
                ) from error
            return

    def _read_holder(self) -> dict[str, Any]:
        """Return the lock file's description of the job that holds the directory. Raises ReadError."""
        data = retried(lambda: os.pread(self._lock, 4096, 0), self.where(_LOCK))
        try:
            found = json.loads(data)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def mark(self) -> str:
        """Return the random text in the lock file."""
        return self._mark

    def sees(self, mark: str) -> bool:
        """Return whether the lock file has ``mark``. Wait for it: a network file system may show it
        late."""
        if self._lock >= 0:  # closing another descriptor of the file would release the lock
            return self._read_holder().get("mark") == mark
        deadline = time.monotonic() + _WAIT_S
        while True:
            with (
                suppress(OSError, ValueError, KeyError),
                open(f"{self.root}/{_LOCK}", "rb") as file,
            ):
                if json.loads(file.read())["mark"] == mark:
                    return True
            if (
                mark == self._names_as_json()
            ):  # rank 0 cannot write, and its mark is the list of names
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)

    def check_claim(self) -> None:
        """Raise CheckpointError if the directory cannot be written, or is another one than was
        claimed."""
        where = f"checkpoints in {self.root}"
        if self._unwritable is not None:
            raise CheckpointError(
                f"{where}: {self._unwritable}: choose a directory to write to, or free some room"
            )
        try:
            own = os.fstat(self._lock)
            there = retried(lambda: os.stat(f"{self.root}/{_LOCK}"), self.where(_LOCK))
        except (FileNotFoundError, NotADirectoryError) as error:
            if _identity(self.root) == self._directory:
                raise PlaceLostError(
                    f"{where}: its lock file {_LOCK} has been removed meanwhile, and nothing keeps "
                    "other jobs out: "
                    "start the job again"
                ) from error
            raise PlaceLostError(f"{where}: the directory has been removed meanwhile") from error
        if (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino):
            raise PlaceLostError(f"{where}: the directory has been replaced meanwhile")
        if self._read_holder().get("mark") != self._mark:
            raise CheckpointError(f"{where}: another job has begun to save there")

    def release(self) -> None:
        """Release the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            _held.discard(self._real)

    def listed(self) -> list[str]:
        """Return the names of all files and folders in the directory."""
        try:
            return retried(lambda: os.listdir(self.root), f"checkpoints in {self.root}")
        except FileNotFoundError:
            return []

    def files(self, name: str) -> list[str]:
        """Return the names of all files in a folder."""
        return os.listdir(f"{self.root}/{name}")

    def is_complete(self, files: Collection[str]) -> bool:
        """Return True. A folder gets its name when it is complete, even if files are missing later."""
        return True

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading."""
        return open(f"{self.root}/{path}", "rb", opener=_open_regular)

    def write(self, path: str, data: bytes) -> None:
        """Write a file and sync it to the disk."""
        with Summed(open(f"{self.root}/{path}", "wb"), {}, path, sync=True) as file:
            file.write(data)

    def folder(self, name: str) -> str:
        """Return a temporary name, which ``claim`` of a later job removes."""
        return f"{_SAVING}{name}-{os.urandom(4).hex()}"

    def commit(self, temporary: str, name: str, manifest: bytes) -> None:
        """Write the manifest, and rename the folder. Raises FileExistsError."""
        self.write(f"{temporary}/{MANIFEST}", sealed(manifest))
        _sync_directory(f"{self.root}/{temporary}")
        # Fails if the target exists and is not empty.
        os.rename(f"{self.root}/{temporary}", f"{self.root}/{name}")
        try:
            _sync_directory(self.root)
        except OSError as error:
            log.warning(
                "distlaunch: checkpoint %s is there, but the directory could not be flushed (%s): "
                "it may be gone after a power failure",
                self.where(name),
                describe(error),
            )

    def remove(self, name: str) -> bool:
        """Remove a folder. It is renamed first, so that it never looks like a checkpoint.

        Return False, and log the error, if that failed. A link, or a folder with other files,
        stays, with True.
        """
        try:
            if os.path.islink(f"{self.root}/{name}"):  # the target may belong to another program
                log.warning("distlaunch: %s stays: it is a symbolic link", self.where(name))
                return True
            if not only_ours(self.files(name)):
                log.warning(
                    "distlaunch: %s stays: it holds files that are no checkpoint's",
                    self.where(name),
                )
                return True
            hidden = name
            if not name.startswith(_SAVING):
                hidden = f"{_REMOVING}{name}-{os.urandom(4).hex()}"
                os.rename(f"{self.root}/{name}", f"{self.root}/{hidden}")
            if self._remove_files(hidden):
                log.info("distlaunch: removed %s", self.where(name))
        except FileNotFoundError:
            return True
        except OSError as error:
            log_not_removed(self.where(name), error)
            return False
        return True

    def _remove_files(self, name: str) -> bool:
        """Remove a folder that has only files of the kinds that a save writes. Return whether it is
        gone."""
        path = f"{self.root}/{name}"
        try:
            files = os.listdir(path)
            if os.path.islink(path) or (files and not only_ours(files)):
                return False
            for file in files:
                os.unlink(f"{path}/{file}")
            os.rmdir(path)
        except OSError:
            return False
        return True

    def set_aside(self, name: str) -> None:
        """Rename a checkpoint's folder, so that it is no longer listed and never removed.

        Does nothing if the directory cannot be written.
        """
        if self._unwritable is None:
            os.rename(f"{self.root}/{name}", f"{self.root}/{_ASIDE}{name}-{os.urandom(4).hex()}")

    def writer(self, folder: str) -> FileSystemWriter:
        """Return torch's writer. Each file is synced before it is closed.

        torch's own ``sync_files`` syncs before Python's buffer is flushed.
        """
        writer = FileSystemWriter(f"{self.root}/{folder}", sync_files=False)
        writer.fs = _Files()
        return writer


_folders: weakref.WeakSet[Folder] = weakref.WeakSet()


def _release_in_child() -> None:
    """Close inherited locks, which would keep the directory locked while the child lives."""
    for folder in list(_folders):
        folder.release()


os.register_at_fork(after_in_child=_release_in_child)


def _lock_file(descriptor: int) -> None:
    """Use a POSIX lock where locks of open files are not supported."""
    if (command := getattr(fcntl, "F_OFD_SETLK", None)) is not None:
        try:
            fcntl.fcntl(descriptor, command, _FLOCK)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            return
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_of_a_lost_node(holder: dict[str, Any]) -> bool:
    job = os.environ.get("DISTLAUNCH_JOB_ID")
    return (
        job is not None and holder.get("job") == job and holder.get("host") != socket.gethostname()
    )


class _Files(FileSystem):
    """torch's file system, which also records the checksum of each file that it writes, and syncs
    the file."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, list[int]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        """Open a file for torch's writer. Its checksum is recorded, and it is synced when it is
        closed."""
        with Summed(open(path, mode), self.sums, os.path.basename(path), sync=True) as stream:  # type: ignore[arg-type]
            yield stream

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[os.path.basename(new_path)] = self.sums.pop(os.path.basename(path))


def _identity(path: str) -> tuple[int, int] | None:
    """Return device and inode, which differ if the directory was replaced."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _open_regular(path: str, flags: int) -> int:
    """Open a regular file. Raises NotAFileError for a FIFO, which would block, a link, which may
    lead out, and so on."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotAFileError(errno.ELOOP, "a symbolic link") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFileError(errno.EINVAL, "not a regular file")
    return descriptor


def _sync_directory(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot sync a directory.
        if error.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
        ):
            raise
    finally:
        os.close(descriptor)
