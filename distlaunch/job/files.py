"""Layer job: how files in a run directory are opened, into which workers may have put anything."""

from __future__ import annotations

import errno
import os
import stat


def open_to_append(path: str) -> int:
    """Open a log file, made if it is not there. Raises OSError if something else than a plain file is in its place."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a worker has put a pipe or device there
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file")
    return descriptor
