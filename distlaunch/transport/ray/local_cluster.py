"""A Ray cluster on this machine: its directory, and ending its processes, which are one process
group."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import time
from contextlib import suppress

_PREFIX = "dl-ray-"
_OWNER = "owner"
_YOUNG_S = 60.0
"""Younger directories are not removed: their owner may not have locked them yet."""
_KILLED_S = 5.0
_LOOK_S = 0.05


def make_folder(base: str | None) -> tuple[str, int]:
    """Create Ray's directory below ``base`` and lock it. Return its path and the descriptor with
    the lock.

    Removes directories of clusters whose owner has ended. ``base`` should be short: a socket's path
    is limited to 107 bytes, of which Ray needs most.
    """
    folder = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
    os.chmod(folder, 0o700)  # whatever the umask
    held = os.open(os.path.join(folder, _OWNER), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    _remove_abandoned(os.path.dirname(folder))
    return folder, held


def _remove_abandoned(base: str) -> None:
    with suppress(OSError), os.scandir(base) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False):
                with suppress(OSError):
                    _remove_left(entry.path, entry.stat(follow_symlinks=False))


def _remove_left(folder: str, found: os.stat_result) -> None:
    if found.st_uid != os.getuid() or time.time() - found.st_mtime < _YOUNG_S:
        return
    held = os.open(
        os.path.join(folder, _OWNER), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    )
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(held)


def end_cluster(folder: str, group: int) -> None:
    """Kill the other processes of a group until they have ended, at most for ``_KILLED_S``. Remove
    the directory."""
    until = time.monotonic() + _KILLED_S
    while (left := _pids_of_group(group)) and time.monotonic() < until:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)
    shutil.rmtree(folder, ignore_errors=True)


def _pids_of_group(group: int) -> list[int]:
    """Return the pids of a process group, without zombies and this process."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            if int(fields[2]) == group and fields[0] not in b"ZX" and int(pid) != os.getpid():
                found.append(int(pid))
    return found
