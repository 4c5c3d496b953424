"""Collect facts about a worker's exit other than its output."""

from __future__ import annotations

import os
import stat

ERROR_FILE_BYTES = 256 << 10


def oom_kills() -> int:
    """Return the kernel's number of out-of-memory kills; 0 if unknown."""
    from distlaunch.core.probe.cpus import count_oom_kills

    return count_oom_kills() or 0


def shared_memory_bytes() -> int | None:
    """Return the size of /dev/shm; None if it is not known."""
    try:
        found = os.statvfs("/dev/shm")  # noqa: S108 - its size, and no file in it
    except OSError:
        return None
    return found.f_frsize * found.f_blocks or None


def read_error_file(path: str) -> str | None:
    """Return the first 256 KiB of a worker's error file; None if it cannot be read or is no regular
    file, which could block.

    Reading may also block if the file is on a file server.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        return os.read(descriptor, ERROR_FILE_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(descriptor)
