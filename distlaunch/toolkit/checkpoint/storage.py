"""Base class for the storage of checkpoints, and their format.

A checkpoint is a folder ``step-<completed steps>`` with files of torch.distributed.checkpoint and
``manifest.json``, which has the size and CRC-32 of each file. In a directory, the folder is renamed
when all files are on the disk. An object store cannot rename, but writes an object completely or
not at all; there the manifest is written last. The name also ends in a mark of the job, because no
lock excludes other jobs.

The location may have files of other programs. A folder is removed or renamed only if ``name``
returns its name, and all its files are of the kinds that a save writes.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import socket
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, BinaryIO, TypeVar

from distlaunch.core.errors import LaunchError

MANIFEST = "manifest.json"
FORMAT = 1
_SEAL = "crc32"
MOST_STEPS = 10**18 - 1
_NAME = re.compile(r"step-(\d{9,18})(?:\.[0-9a-f]{16})?")
OUR_FILE = re.compile(r"\.metadata(?:\.tmp)?|__\d+_\d+\.distcp|manifest\.json")
"""Files of torch.distributed.checkpoint, and the manifest."""
_PIECE_BYTES = 4 << 20
_MANIFEST_BYTES = 64 << 20
"""Largest size of a manifest, enough for half a million workers."""
_MOST_WORKERS = 1 << 24
_RETRIES_S = 0.2, 1.0
"""Pauses between the tries of a failed read. Network file systems recover from most errors."""
_SHOWN = 5
_LONGEST = 4000

log = logging.getLogger("distlaunch.checkpoint")
_not_removed: set[str] = set()
T = TypeVar("T")


class CheckpointError(LaunchError):
    """A checkpoint could not be written or read. The text names the newest complete checkpoint."""

    exit_code = 1


class PlaceLostError(CheckpointError):
    """The directory or URL has disappeared with all checkpoints."""


class AllDamagedError(CheckpointError):
    """None of the checkpoints is complete and intact."""


class ReadError(CheckpointError):
    """A file could not be read (permissions, timeout, I/O error). It may be intact."""


class NotAFileError(OSError):
    """A directory, FIFO or the like has the name of a file."""


def describe(error: BaseException) -> str:
    """Return the text of an error, or its class."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def retried(action: Callable[[], T], what: str) -> T:
    """Return the result of ``action``, retried after errors that may be temporary.

    Raises FileNotFoundError, NotADirectoryError and NotAFileError at once, and ReadError for any
    other error that persists.
    """
    for pause_s in (*_RETRIES_S, None):
        try:
            return action()
        except (FileNotFoundError, NotADirectoryError, NotAFileError, ReadError):
            raise
        except Exception as error:  # fsspec's packages raise errors of any class
            if pause_s is None:
                raise ReadError(
                    f"{what} cannot be read on {socket.gethostname()}: {describe(error)}"
                ) from error
        time.sleep(pause_s)
    raise AssertionError("the last try returns or raises")


def one_line(text: str) -> str:
    """Return a text, perhaps of a checkpoint, in printable form."""
    printable = "".join(
        each if each.isprintable() else " " if each.isspace() else "?" for each in text[:_LONGEST]
    )
    return printable if len(text) <= _LONGEST else f"{printable}…"


class Summed(io.RawIOBase):
    """A file being written, with its size and checksum. With ``sync`` it is synced when closed."""

    def __init__(self, raw: BinaryIO, sums: dict[str, list[int]], name: str, *, sync: bool) -> None:
        self._raw, self._sums, self._name, self._sync = raw, sums, name, sync
        self._size = self._crc = 0
        self._error: OSError | None = None

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Write all bytes of ``data``, and return their number."""
        view = memoryview(data).cast("B")
        try:
            self._raw.write(view)
        except OSError as error:
            self._error = error
            raise
        self._crc = zlib.crc32(view, self._crc)
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        """Return how many bytes have been written."""
        return self._size

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        finally:
            # torch's writer raises a RuntimeError without its cause.
            if self._error is not None:
                raise self._error from None

    def close(self) -> None:
        """Flush, sync and close the file. Record size and checksum only if all this succeeds."""
        if self.closed:
            return
        try:
            with self._raw:
                if self._sync:
                    self._raw.flush()
                    os.fsync(self._raw.fileno())
            self._sums[self._name] = [self._size, self._crc]
        finally:
            super().close()


class Store(ABC):
    """A directory or URL with checkpoints. ``names`` are folders' names; paths are
    ``name/file``."""

    root: str

    @abstractmethod
    def claim(self) -> None:
        """Reserve the location for this job, on rank 0, and remove what interrupted saves have
        left.

        Raises ConfigError if the location cannot be used, or another job uses it.
        """

    @abstractmethod
    def check_claim(self) -> None:
        """Raise CheckpointError if another job has claimed the location."""

    @abstractmethod
    def sees(self, mark: str) -> bool:
        """Return whether this worker sees the mark of rank 0."""

    @abstractmethod
    def mark(self) -> str:
        """Return the argument for ``sees``, on rank 0."""

    @abstractmethod
    def release(self) -> None:
        """Release the location."""

    @abstractmethod
    def listed(self) -> list[str]:
        """Return the names of all folders and files, in any order."""

    @abstractmethod
    def files(self, name: str) -> list[str]:
        """Return the names of all files in a folder. Raises FileNotFoundError or
        NotADirectoryError."""

    @abstractmethod
    def is_complete(self, files: Collection[str]) -> bool:
        """Return whether a folder with these file names was once complete."""

    @abstractmethod
    def open(self, path: str) -> BinaryIO:
        """Open a file for reading."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Write a file and sync it to the disk."""

    def name(self, steps: int) -> str:
        """Return the name of a new checkpoint, on rank 0 after ``claim``."""
        return name_of(steps)

    def folder(self, name: str) -> str:
        """Return the folder to write to, which ``commit`` makes the checkpoint."""
        return name

    @abstractmethod
    def commit(self, temporary: str, name: str, manifest: bytes) -> None:
        """Make the folder that was written a complete checkpoint."""

    @abstractmethod
    def remove(self, name: str) -> bool:
        """Remove a folder that has only files of a save. It never looks complete meanwhile.

        Return False, and log the error, if that failed and may be tried again. A folder with other
        files stays; then return True.
        """

    @abstractmethod
    def set_aside(self, name: str) -> None:
        """Rename a checkpoint, so that ``names`` omits it and its name is free. Raises OSError."""

    @abstractmethod
    def writer(self, folder: str) -> Any:
        """Return torch's writer. Its ``fs.sums`` has the checksums of the files written."""

    def names(self) -> list[str]:
        """Return completed checkpoints, also damaged ones, the newest first."""
        return sorted(filter(self.is_ours, self.listed()), key=steps_of, reverse=True)

    def foreign(self) -> list[str]:
        """Return names that begin like a checkpoint's. They are never touched."""
        return sorted(
            name for name in self.listed() if name.startswith("step-") and not self.is_ours(name)
        )

    def is_ours(self, name: str) -> bool:
        """Return whether a folder is a checkpoint of this format, perhaps damaged.

        Without a readable manifest, all files must be of the kinds that a save writes.
        """
        if steps_of(name) < 0:
            return False
        try:
            files = retried(lambda: self.files(name), self.where(name))
        except (FileNotFoundError, NotADirectoryError):
            return False
        if not self.is_complete(files):
            return False
        try:
            data = self.read(f"{name}/{MANIFEST}", _MANIFEST_BYTES) if MANIFEST in files else b""
        except (ReadError, NotAFileError, FileNotFoundError):
            data = b""
        if (recognised := _is_a_manifest(data)) is None:
            return only_ours(files)
        return recognised

    def where(self, name: str) -> str:
        """Return the name of a checkpoint for the user."""
        return f"{self.root.rstrip('/')}/{name}"

    def read(self, path: str, most: int | None = None) -> bytes:
        """Return a file, or its first ``most`` bytes. Raises as ``retried``."""

        def whole() -> bytes:
            with self.open(path) as file:
                return file.read() if most is None else file.read(most)

        return retried(whole, self.where(path))

    def manifest(self, name: str) -> dict[str, Any]:
        """Return a checkpoint's manifest.

        Raises ValueError if it is damaged, OSError if it is missing, ReadError if it cannot be
        read.
        """
        data = self.read(f"{name}/{MANIFEST}", _MANIFEST_BYTES)
        try:
            return _parse_manifest(data, steps_of(name))
        except RecursionError as error:
            raise ValueError(f"{MANIFEST} is nested too deeply") from error

    def damage(self, name: str, files: Mapping[str, Any]) -> str | None:
        """Compare files with the manifest. Return a text about the first damaged file, if any.

        Raises ReadError.
        """

        def sums(path: str) -> tuple[int, int]:
            size = crc = 0
            with self.open(path) as stream:
                while piece := stream.read(_PIECE_BYTES):
                    size += len(piece)
                    crc = zlib.crc32(piece, crc)
            return size, crc

        for file, written in files.items():
            path = f"{name}/{file}"
            try:
                size, crc = retried(lambda path=path: sums(path), self.where(path))  # type: ignore[misc]
            except (FileNotFoundError, NotADirectoryError):
                return f"{file} is missing"
            except NotAFileError as error:
                return f"{file}: {describe(error)}"
            if size != written[0]:
                return f"{file} has {size:,} bytes, not {written[0]:,}"
            if crc != written[1]:
                return f"{file} is not what was written (its CRC-32 differs)"
        return None


def name_of(steps: int) -> str:
    """Return the name of the checkpoint after this number of steps."""
    return f"step-{steps:09d}"


def steps_of(name: str) -> int:
    """Return the steps in the name of a checkpoint; -1 for another name."""
    found = _NAME.fullmatch(name)
    if found is None or not name.startswith(name_of(int(found[1]))):
        return -1
    return int(found[1])


def only_ours(files: Collection[str]) -> bool:
    """Return whether there are files, all with names that a save writes."""
    return bool(files) and all(OUR_FILE.fullmatch(file) for file in files)


def some(names: Collection[str]) -> str:
    """Return the first names, and the number of others."""
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(list(names)[:_SHOWN]) + more


def log_not_removed(where: str, error: BaseException) -> None:
    """Log that ``where`` could not be removed, the first time as a warning."""
    level = logging.DEBUG if where in _not_removed else logging.WARNING
    _not_removed.add(where)
    log.log(level, "distlaunch: %s could not be removed: %s", where, describe(error))


def sealed(manifest: bytes) -> bytes:
    """Return the manifest with its own checksum added."""
    return json.dumps({**json.loads(manifest), _SEAL: zlib.crc32(manifest)}).encode()


def _parse_manifest(data: bytes, steps: int) -> dict[str, Any]:
    """Return the manifest. Raises ValueError if it is incomplete, its checksum differs, or it is of
    another checkpoint."""
    found = json.loads(data)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{MANIFEST} is not one of format {FORMAT}")
    seal = found.pop(_SEAL, None)
    if seal != zlib.crc32(json.dumps(found).encode()):
        raise ValueError(f"{MANIFEST} is not what was written (its CRC-32 differs)")
    if found.get("steps") != steps:
        raise ValueError(f"{MANIFEST} is of the checkpoint after {found.get('steps')} steps")
    files, world_size, kinds = found.get("files"), found.get("world_size"), found.get("optimizers")
    if (
        not isinstance(files, dict)
        or not all(
            OUR_FILE.fullmatch(name) and _is_size_and_sum(each) for name, each in files.items()
        )
        or ".metadata" not in files
        or not isinstance(world_size, int)
        or not 1 <= world_size <= _MOST_WORKERS
        or not (
            kinds is None
            or (isinstance(kinds, list) and all(isinstance(each, str) for each in kinds))
        )
    ):
        raise ValueError(f"{MANIFEST} has other contents than one of format {FORMAT}")
    return found


def _is_size_and_sum(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(isinstance(number, int) and 0 <= number < 1 << 63 for number in value)


def _is_a_manifest(data: bytes) -> bool | None:
    """Return whether data is a manifest, perhaps a changed one; None if it is not JSON."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return {"format", "steps", "files"} <= found.keys() if isinstance(found, dict) else None
