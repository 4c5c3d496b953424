"""Create directories with mode 0700 and files with mode 0600, whatever the umask is.

A umask may be too permissive (0 in some containers) or too strict: under 0177, a new directory
cannot be entered.
"""

from __future__ import annotations

import errno
import os
import stat


def make_private_dir(path: str) -> None:
    """Create a directory that only its owner can enter. Raises OSError, also if it exists."""
    os.mkdir(path, 0o700)
    _complete(path, 0o700)


def make_private_dirs(path: str) -> None:
    """Create a directory and its missing parents, as far as they are not there. Raises OSError."""
    above = os.path.dirname(path)
    if above not in ("", path) and not os.path.isdir(above):
        make_private_dirs(above)
    try:
        make_private_dir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None


def open_private(path: str, flags: int) -> int:
    """Open a file with these flags and return its descriptor. Raises OSError.

    Only the owner can read and write a new file.
    """
    descriptor = os.open(path, flags, 0o600)
    try:
        _complete(descriptor, 0o600)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _complete(what: str | int, wanted: int) -> None:
    """Add the owner's permissions that the umask has removed."""
    found = os.stat(what)
    mode = stat.S_IMODE(found.st_mode)
    is_plain = stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)
    if mode & wanted != wanted and is_plain and found.st_uid == os.geteuid():
        os.chmod(what, mode | wanted)
