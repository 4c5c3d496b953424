"""Read small files of the kernel, and files of the user with bounds on time and size.

The kernel's files are below a root directory that tests can replace.
"""

from __future__ import annotations

import errno
import os
import select
import time
from contextlib import suppress

_LONGEST = 1 << 16
_STEP_S = 0.01
WRITER_S = 5.0
"""How long to wait until a program opens a FIFO for writing."""


def read_text(path: str) -> str | None:
    """Return the content of a small file; None if it cannot be read."""
    # os.read is faster than open(): with 256 CPUs some hundred files are read before the first
    # worker starts.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        chunks = []
        while chunk := os.read(fd, _LONGEST):
            chunks.append(chunk)
    except OSError:
        return None
    finally:
        os.close(fd)
    return b"".join(chunks).decode(errors="replace")


def read_bounded(path: str, *, most: int, timeout_s: float, writer_s: float = WRITER_S) -> bytes:
    """Return the content of a user's file, which may be a pipe (``<(command)``).

    Raises OSError: EFBIG for more than ``most`` bytes; ETIMEDOUT if the end is not reached within
    ``timeout_s``, or if no program opens a FIFO for writing within ``writer_s``. Raises ValueError
    for a NUL in the name.
    """
    began_s = time.monotonic()
    until_s = began_s + timeout_s
    fd = os.open(
        path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    )  # opening a FIFO would block otherwise
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        data = bytearray()
        while len(data) <= most:
            now_s = time.monotonic()
            if now_s >= until_s:
                raise OSError(errno.ETIMEDOUT, f"no end of it came within {timeout_s:g} s")
            is_ready = bool(poll.poll(min(until_s - now_s, writer_s) * 1000))
            with suppress(BlockingIOError):
                chunk = os.read(fd, _LONGEST)
                data += chunk
                if (
                    chunk or not is_ready
                ):  # an empty read before POLLIN: no program has the FIFO open for writing
                    if not data and time.monotonic() >= began_s + writer_s:
                        raise OSError(
                            errno.ETIMEDOUT, f"no program writes to it (waited {writer_s:g} s)"
                        )
                    continue
                return bytes(data)
            time.sleep(_STEP_S)
        raise OSError(errno.EFBIG, f"it has more than {_size_text(most)}")
    finally:
        os.close(fd)


def read_int(path: str) -> int | None:
    """Return the number that is the content of a file; None if it cannot be read or has other
    content."""
    return parse_int(read_text(path))


def parse_int(text: str | None) -> int | None:
    """Return ``text`` as an integer; None if it is none."""
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        return None


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the CPUs of the kernel's list format (``0-3,8``), in ascending order. Invalid items
    are ignored."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        low, high = parse_int(first), parse_int(last or first)
        if low is not None and high is not None:
            cpus.update(range(low, high + 1))
    return tuple(sorted(cpus))


def under(root: str, path: str) -> str:
    """Return the absolute ``path`` below ``root``."""
    return path if root == "/" else root.rstrip("/") + path


def _size_text(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count:,} bytes"
