"""What a worker that has ended leaves beside its output."""

from __future__ import annotations

import os
import stat

ERROR_FILE_BYTES = 256 << 10


def oom_kills() -> int:
    """Count the OOM kills so far; 0 where the kernel does not tell."""
    from distlaunch.core.probe.cpus import count_oom_kills

    return count_oom_kills() or 0


def read_error_file(path: str) -> str | None:
    """Read what the worker left, if it is a plain file: anything else could keep us, or be somebody
    else's.

    Where the folder is a file server's, this may wait for that.
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
