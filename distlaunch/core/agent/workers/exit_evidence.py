"""Collect the evidence of a worker's exit besides its output."""

from __future__ import annotations

import os
import stat

ERROR_FILE_BYTES = 256 << 10


def oom_kills() -> int:
    """Return the number of OOM kills so far; 0 if the kernel does not say."""
    from distlaunch.core.probe.cpus import count_oom_kills

    return count_oom_kills() or 0


def read_error_file(path: str) -> str | None:
    """Return the worker's error file. Return None unless it is a regular file: others could block
    the reader.

    May block if the file is on a file server.
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
