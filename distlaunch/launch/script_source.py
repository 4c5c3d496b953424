"""Read the text of SCRIPT, and find it if it is no plain file.

A script that can be read only once or only by the launcher (a pipe, a terminal, stdin) is written
into the run directory, where all workers run it.
"""

from __future__ import annotations

import errno
import math
import os
import select
import stat
from collections.abc import Sequence
from contextlib import suppress

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import printable
from distlaunch.core.private_files import open_private
from distlaunch.core.probe.files import read_bounded
from distlaunch.planning.build_plan import script_paths
from distlaunch.planning.train_options import TrainOptions

MOST_BYTES = 16 << 20
_MOST_TEXT_BYTES = 4 << 20
_OWN = ("/dev/fd/", "/proc/self/fd/", "/proc/thread-self/fd/")
_CHUNK = 1 << 16


class ScriptSource(Record):
    """A script that is not a plain file, and the name of the file for it."""

    path: str
    name: str
    descriptor: int | None
    """The launcher's descriptor if the path leads to one (/dev/fd/63). Workers have another file
    there."""

    def read(self) -> bytes:
        """Return the text of the script.

        A program that has opened a FIFO may take any time. Raises ConfigError if none opens it, if
        the script is too long, or if reading fails.
        """
        named = printable(self.path)
        try:
            if self.descriptor is None:
                return read_bounded(self.path, most=MOST_BYTES, timeout_s=math.inf)
            descriptor = os.dup(self.descriptor)
            try:
                return _read_all(descriptor, named)
            finally:
                os.close(descriptor)
        except OSError as exc:
            if exc.errno == errno.EFBIG:
                raise _too_long_error(named) from exc
            hint = (
                "start the program that writes the script first"
                if exc.errno == errno.ETIMEDOUT
                else None
            )
            raise ConfigError(f"{named}: {exc.strerror}", hint=hint) from exc


def script_text(options: TrainOptions, cwd: str) -> bytes | None:
    """Return the text of a Python script or module that is a plain file here, else None.

    ``--workdir`` is searched first, then ``cwd``. A file of over 4 MiB is ignored.
    """
    name = options.script
    if name is None or (options.no_python and not options.module):
        return None
    if options.module:
        name = name.replace(".", os.sep) + ".py"
    for path in script_paths(name, cwd, os.path.join(cwd, options.workdir or "")):
        with suppress(OSError, ValueError):  # it does not exist or is not a path
            found = os.stat(path)
            if stat.S_ISREG(found.st_mode) and found.st_size <= _MOST_TEXT_BYTES:
                with open(path, "rb") as file:
                    return file.read(_MOST_TEXT_BYTES)
    return None


def missing_script(options: TrainOptions, cwd: str) -> str | None:
    """Return a text if SCRIPT is not on this machine, without a full stop; None if it is, or if it
    is a module or a program."""
    name = options.script
    if name is None or options.module or options.no_python:
        return None
    paths = script_paths(name, cwd, os.path.join(cwd, options.workdir or ""))
    if any(os.path.exists(path) for path in paths):
        return None
    where = " and ".join(printable(os.path.dirname(path)) for path in paths)
    return f"{printable(name)} is not here (looked in {where})"


def find_source(script: str, paths: Sequence[str]) -> ScriptSource | None:
    """Return the source of a SCRIPT that workers cannot open themselves; None if they can, or if it
    does not exist.

    ``paths`` are its possible paths, in order of preference.
    """
    if script == "-":
        return ScriptSource(path="-", name="stdin.py", descriptor=0)
    for path in paths:
        if (number := _own_descriptor(path)) is not None:
            name = "stdin.py" if number == 0 else f"fd-{number}.py"
            return ScriptSource(path=script, name=name, descriptor=number)
        try:
            mode = os.stat(path).st_mode
        except (OSError, ValueError):
            continue
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            return None
        if path != os.devnull:
            name = os.path.basename(path).removesuffix(".py")
            return ScriptSource(path=path, name=f"{name}.py", descriptor=None)
    return None


def _own_descriptor(path: str) -> int | None:
    own = (*_OWN, f"/proc/{os.getpid()}/fd/")
    for _ in range(8):
        if path == "/dev/stdin":
            return 0
        prefix = next((prefix for prefix in own if path.startswith(prefix)), None)
        if prefix is not None:
            number = path[len(prefix) :]
            return (
                int(number) if number.isascii() and number.isdecimal() and len(number) < 8 else None
            )
        try:
            path = os.path.join(os.path.dirname(path), os.readlink(path))
        except (OSError, ValueError):
            return None
    return None


def _read_all(descriptor: int, named: str) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        try:
            part = os.read(descriptor, _CHUNK)
        except BlockingIOError:  # another process that shares it has set O_NONBLOCK
            select.select([descriptor], [], [])
            continue
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise _too_long_error(named)


def _too_long_error(named: str) -> ConfigError:
    return ConfigError(
        f"{named}: the script is longer than {MOST_BYTES >> 20} MiB, the limit for a pipe",
        hint="write the script to a file",
    )


def write_script(folder: str, name: str, text: bytes) -> str:
    """Write the script to a new file of the run directory. Return its path. Raises ConfigError."""
    path = os.path.join(folder, name)
    try:
        descriptor = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
    except OSError as exc:
        raise ConfigError(f"{printable(path)}: {os.strerror(exc.errno or 0)}") from exc
    return path
