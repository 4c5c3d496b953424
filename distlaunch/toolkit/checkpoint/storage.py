"""Where checkpoints lie. ``Folder`` is a directory that all nodes share, ``Bucket`` an fsspec URL.

A checkpoint is a folder ``step-<steps done>`` with torch.distributed.checkpoint's files and
``manifest.json``, which names each with its size and CRC-32. In a directory it gets its name by one
rename when all of it is on the disk. An object store cannot rename, but writes each object whole or
not at all: there the manifest comes last and is the mark, and the name ends in the mark of the job
that has made it, since nothing keeps two jobs apart.

A place may hold what others have written. Only what is certainly a checkpoint of this format is
ever removed or renamed: its name is exactly one that ``name`` gives, and all files in it are of the
kinds that a save writes.
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
"""The most steps that a name can tell: 18 digits."""
_NAME = re.compile(r"step-(\d{9,18})(?:\.[0-9a-f]{16})?")
OUR_FILE = re.compile(r"\.metadata(?:\.tmp)?|__\d+_\d+\.distcp|manifest\.json")
"""The files of a checkpoint: torch.distributed.checkpoint's and the manifest."""
_PIECE_BYTES = 4 << 20
_MANIFEST_BYTES = 64 << 20
"""The largest manifest: enough for half a million workers."""
_MOST_WORKERS = 1 << 24
_RETRIES_S = 0.2, 1.0
"""How long to wait before each further try of a read that failed: network file systems recover from
most errors."""
_SHOWN = 5
_LONGEST = 4000
"""How many characters of a text are printed."""

log = logging.getLogger("distlaunch.checkpoint")
_not_removed: set[str] = set()
"""Places that a warning has named."""
T = TypeVar("T")


class CheckpointError(LaunchError):
    """A checkpoint could not be written or read. The text says which one is whole and kept."""

    exit_code = 1


class PlaceLostError(CheckpointError):
    """The place is not there any more, nor is what was in it."""


class ReadError(CheckpointError):
    """Something could not be read (no permission, a timeout, an error of I/O): it may be damaged or
    whole."""


class NotAFileError(OSError):
    """There is something else in the place of a file: a directory, a FIFO."""


def describe(error: BaseException) -> str:
    """Describe an error in words; the class where it has none of its own."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def retried(action: Callable[[], T], what: str) -> T:
    """Return what ``action`` gives; try again after errors that may pass.

    Raises FileNotFoundError, NotADirectoryError and NotAFileError as they come, and ReadError for
    any other error that stays: its text names ``what``, the error and this host.
    """
    for pause_s in (*_RETRIES_S, None):
        try:
            return action()
        except (FileNotFoundError, NotADirectoryError, NotAFileError, ReadError):
            raise
        except Exception as error:  # an object store's package raises whatever it likes
            if pause_s is None:
                raise ReadError(
                    f"{what} cannot be read on {socket.gethostname()}: {describe(error)}"
                ) from error
        time.sleep(pause_s)
    raise AssertionError("the last try returns or raises")


def one_line(text: str) -> str:
    """Return a text as it can be printed: it may have texts of a checkpoint, with anything in
    them."""
    printable = "".join(
        each if each.isprintable() else " " if each.isspace() else "?" for each in text[:_LONGEST]
    )
    return printable if len(text) <= _LONGEST else f"{printable}…"


class Summed(io.RawIOBase):
    """A file being written: counts and sums its bytes, and has them on the disk when it is
    closed."""

    def __init__(self, raw: BinaryIO, sums: dict[str, list[int]], name: str, *, sync: bool) -> None:
        self._raw, self._sums, self._name, self._sync = raw, sums, name, sync
        self._size = self._crc = 0
        self._error: OSError | None = None

    def writable(self) -> bool:
        """Say yes."""
        return True

    def write(self, data: Any) -> int:
        """Write all of it."""
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
        """Tell how many bytes have been written."""
        return self._size

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        finally:
            if (
                self._error is not None
            ):  # torch's writer makes a RuntimeError without the cause of it
                raise self._error from None

    def close(self) -> None:
        """Flush, have it on the disk, close: an error of any of these is raised, and nothing is
        recorded."""
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
    """A place for checkpoints. Names are those of folders in it; paths are ``name/file``."""

    root: str

    @abstractmethod
    def claim(self) -> None:
        """Take the place for this job and remove what a killed one left half-written. Rank 0 calls
        it.

        Raises ConfigError if the place cannot be used, or another job has it.
        """

    @abstractmethod
    def check_claim(self) -> None:
        """Raise CheckpointError if another job has taken the place meanwhile."""

    @abstractmethod
    def sees(self, mark: str) -> bool:
        """Return whether this worker sees what rank 0 wrote when it claimed the place."""

    @abstractmethod
    def mark(self) -> str:
        """Return what ``sees`` takes; rank 0's."""

    @abstractmethod
    def release(self) -> None:
        """Give the place back."""

    @abstractmethod
    def listed(self) -> list[str]:
        """Return the names of all folders and files in the place, in any order."""

    @abstractmethod
    def files(self, name: str) -> list[str]:
        """Return the names of all files in a folder. Raises FileNotFoundError or NotADirectoryError
        if it is none."""

    @abstractmethod
    def is_complete(self, files: Collection[str]) -> bool:
        """Return whether a folder with these files was completed once, as far as their names
        tell."""

    @abstractmethod
    def open(self, path: str) -> BinaryIO:
        """Open a file for reading."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Write a file, and have it on the disk."""

    def name(self, steps: int) -> str:
        """Name the checkpoint that is to be made after so many steps. Rank 0's, once it has claimed
        the place."""
        return name_of(steps)

    def folder(self, name: str) -> str:
        """Name the folder that it is written to, of which ``commit`` makes the checkpoint."""
        return name

    @abstractmethod
    def commit(self, temporary: str, name: str, manifest: bytes) -> None:
        """Make what has been written a checkpoint."""

    @abstractmethod
    def remove(self, name: str) -> bool:
        """Remove a folder that holds nothing but files of ours; at no instant does a part of it
        look whole.

        Never raises. Returns False if an error kept it there, which is logged: to try again may
        help.
        """

    @abstractmethod
    def set_aside(self, name: str) -> None:
        """Rename a checkpoint so that it is not one any more, and its name is free. Raises OSError
        if that fails."""

    @abstractmethod
    def writer(self, folder: str) -> Any:
        """Give torch's writer; what it writes is summed in its ``fs.sums``."""

    def names(self) -> list[str]:
        """Return the names of checkpoints that were completed, damaged ones too, the newest
        first."""
        return sorted(filter(self.is_ours, self.listed()), key=steps_of, reverse=True)

    def foreign(self) -> list[str]:
        """Return names that begin like a checkpoint's and are not: somebody else's, left alone."""
        return sorted(
            name for name in self.listed() if name.startswith("step-") and not self.is_ours(name)
        )

    def is_ours(self, name: str) -> bool:
        """Return whether a folder is a checkpoint of this format, be it a damaged one.

        Its manifest says so, or else all of its files are of the kinds that a save writes.
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
        """Name a checkpoint for people."""
        return f"{self.root.rstrip('/')}/{name}"

    def read(self, path: str, most: int | None = None) -> bytes:
        """Return what is in a file, or its first ``most`` bytes. Raises as ``retried`` does."""

        def whole() -> bytes:
            with self.open(path) as file:
                return file.read() if most is None else file.read(most)

        return retried(whole, self.where(path))

    def manifest(self, name: str) -> dict[str, Any]:
        """Return what the manifest of a checkpoint says.

        Raises ValueError or OSError if it is damaged or missing, and ReadError if that cannot be
        told.
        """
        data = self.read(f"{name}/{MANIFEST}", _MANIFEST_BYTES)
        try:
            return _manifest(data, steps_of(name))
        except RecursionError as error:
            raise ValueError(f"{MANIFEST} is nested too deeply") from error

    def damage(self, name: str, files: Mapping[str, Any]) -> str | None:
        """Read files; return which one is not as it was written, if any.

        Raises ReadError for one that cannot be read, which may well be whole.
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
    """Name the checkpoint after so many steps."""
    return f"step-{steps:09d}"


def steps_of(name: str) -> int:
    """Return after how many steps a checkpoint was made; -1 if the name is not one of a
    checkpoint."""
    found = _NAME.fullmatch(name)
    if found is None or not name.startswith(name_of(int(found[1]))):
        return -1
    return int(found[1])


def only_ours(files: Collection[str]) -> bool:
    """Return whether there are files and all of them are of the kinds that a save writes."""
    return bool(files) and all(OUR_FILE.fullmatch(file) for file in files)


def some(names: Collection[str]) -> str:
    """Return the first of several names, and how many more there are."""
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(list(names)[:_SHOWN]) + more


def log_not_removed(where: str, error: BaseException) -> None:
    """Log that something could not be removed: a warning for the first time of each."""
    level = logging.DEBUG if where in _not_removed else logging.WARNING
    _not_removed.add(where)
    log.log(level, "distlaunch: %s could not be removed: %s", where, describe(error))


def sealed(manifest: bytes) -> bytes:
    """Add a sum of its own to a manifest, as json.dumps has made it."""
    return json.dumps({**json.loads(manifest), _SEAL: zlib.crc32(manifest)}).encode()


def _manifest(data: bytes, steps: int) -> dict[str, Any]:
    """Read one, and see that it is all there: what it leaves out would not be looked at."""
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
    """Return whether it is one of this format, perhaps a changed one; None if nothing can be told
    from it."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return {"format", "steps", "files"} <= found.keys() if isinstance(found, dict) else None
