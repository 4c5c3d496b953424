"""Layer toolkit: where checkpoints lie. ``Folder`` is a directory that all nodes share, ``Bucket`` an fsspec URL.

A checkpoint is a folder ``step-<steps done>`` with torch.distributed.checkpoint's files and ``manifest.json``, which
names each with its size and CRC-32. In a directory it gets its name by one rename when all of it is on the disk. An
object store cannot rename, but writes each object whole or not at all: there the manifest comes last and is the mark,
and the name ends in the mark of the job that has made it, since nothing keeps two jobs apart.
"""

from __future__ import annotations

import io
import json
import os
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, BinaryIO
from urllib.parse import unquote

from distlaunch.core.errors import ConfigError, LaunchError

MANIFEST = "manifest.json"
FORMAT = 1
_SEAL = "crc32"
_NAME = re.compile(r"step-(\d{1,18})(?:\.[0-9a-f]{16})?")
_PIECE_BYTES = 4 << 20


class CheckpointError(LaunchError):
    """A checkpoint could not be written or read. The text says which one is whole and kept."""

    exit_code = 1


class PlaceLostError(CheckpointError):
    """The place is not there any more, nor is what was in it."""


class Summed(io.RawIOBase):
    """A file being written: counts and sums its bytes, and has them on the disk when it is closed."""

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
            if self._error is not None:  # torch's writer makes a RuntimeError without the cause of it
                raise self._error from None

    def close(self) -> None:
        """Flush, have it on the disk, close: an error of any of these is raised, and nothing is recorded."""
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
        """Take the place for this job and remove what a killed one left half-written. Rank 0 calls it.

        Raises ConfigError if the place cannot be used, or another job has it.
        """

    @abstractmethod
    def check_claim(self) -> None:
        """Raise CheckpointError if another job has taken the place meanwhile."""

    @abstractmethod
    def sees(self, mark: str) -> bool:
        """Tell whether this worker sees what rank 0 wrote when it claimed the place."""

    @abstractmethod
    def mark(self) -> str:
        """Give what ``sees`` takes; rank 0's."""

    @abstractmethod
    def release(self) -> None:
        """Give the place back."""

    @abstractmethod
    def listed(self) -> list[str]:
        """List the folders of checkpoints that were completed, damaged ones too, in any order."""

    @abstractmethod
    def open(self, path: str) -> BinaryIO:
        """Open a file for reading."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Write a file, and have it on the disk."""

    def name(self, steps: int) -> str:
        """Name the checkpoint that is to be made after so many steps. Rank 0's, once it has claimed the place."""
        return name_of(steps)

    def folder(self, name: str) -> str:
        """Name the folder that it is written to, of which ``commit`` makes the checkpoint."""
        return name

    @abstractmethod
    def commit(self, temporary: str, name: str, manifest: bytes) -> None:
        """Make what has been written a checkpoint."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a folder so that at no instant a part of it looks whole; never raises."""

    @abstractmethod
    def set_aside(self, name: str) -> None:
        """Rename a checkpoint so that it is not one any more, and its name is free."""

    @abstractmethod
    def writer(self, folder: str) -> Any:
        """Give torch's writer; what it writes is summed in its ``fs.sums``."""

    @abstractmethod
    def reader(self, folder: str) -> Any:
        """Give torch's reader."""

    def names(self) -> list[str]:
        """List checkpoints, the newest first."""
        return sorted((name for name in self.listed() if _NAME.fullmatch(name)), key=steps_of, reverse=True)

    def where(self, name: str) -> str:
        """Name a checkpoint for people."""
        return f"{self.root.rstrip('/')}/{name}"

    def manifest(self, name: str) -> dict[str, Any]:
        """Read what is in a checkpoint. Raises OSError or ValueError where that cannot be told."""
        try:
            with self.open(f"{name}/{MANIFEST}") as file:
                return _manifest(file.read(), steps_of(name))
        except (OSError, ValueError):
            raise
        except Exception as error:  # an object store's own, or a RecursionError: all workers wait for the answer
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def damage(self, name: str, files: Mapping[str, Any]) -> str | None:
        """Read files and say which one is not as it was written, if any."""
        for file, written in files.items():
            size = crc = 0
            try:
                with self.open(f"{name}/{file}") as stream:
                    while piece := stream.read(_PIECE_BYTES):
                        size += len(piece)
                        crc = zlib.crc32(piece, crc)
            except OSError as error:
                return f"{file}: {error.strerror or error}"
            except Exception as error:  # noqa: BLE001 - an object store's own: all workers wait for the answer
                return f"{file}: {type(error).__name__}: {error}"
            if size != written[0]:
                return f"{file} has {size:,} bytes, not {written[0]:,}"
            if crc != written[1]:
                return f"{file} is not what was written (its CRC-32 differs)"
        return None


def name_of(steps: int) -> str:
    """Name the checkpoint after so many steps."""
    return f"step-{steps:09d}"


def steps_of(name: str) -> int:
    """Tell after how many steps a checkpoint was made."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else -1


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
    if found["steps"] != steps:
        raise ValueError(f"{MANIFEST} is of the checkpoint after {found['steps']} steps")
    return found


def store_for(where: str | os.PathLike[str]) -> Store:
    """Choose by what is written: a URL with a scheme other than ``file`` is fsspec's.

    Raises ConfigError for what is neither a path nor a URL, and for a URL that has been a ``Path``.
    """
    given: object = where  # whatever a script has read from its options
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigError(f"checkpoints in {where!r}: not a path or a URL: give a directory, as 'runs/a'")
    scheme, slashes, rest = path.partition("://")
    if slashes and scheme != "file":
        from distlaunch.toolkit.checkpoint_bucket import Bucket

        return Bucket(path)
    if slashes:
        host, _, rest = rest.partition("/")
        if host not in ("", "localhost"):
            raise ConfigError(f"checkpoints in {path}: file:// has three slashes before a path: file:///{host}/{rest}")
        path = f"/{unquote(rest)}"
    elif (first := path.partition("/")[0]).endswith(":"):  # pathlib.Path makes one slash of two
        raise ConfigError(
            f"checkpoints in {path}: a directory named {first}, or a URL that has lost a slash? "
            f"Give a URL as a str ('{first}//{path.removeprefix(first).lstrip('/')}'), and a directory as './{path}'"
        )
    else:
        path = os.path.expanduser(path)
    from distlaunch.toolkit.checkpoint_folder import Folder

    return Folder(os.path.abspath(path))
