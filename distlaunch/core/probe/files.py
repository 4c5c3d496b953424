"""Read files: the kernel's small ones, below a root that tests can move, and a user's, in
bounds."""

from __future__ import annotations

import errno
import os
import select
import time
from contextlib import suppress

_LONGEST = 1 << 16
_STEP_S = 0.01
WRITER_S = 5.0
"""How long a FIFO may be without a program that has it open for writing."""


def read_text(path: str) -> str | None:
    """Return what a small file says, or None where it is missing or may not be read."""
    # os.read instead of open(): a machine with 256 CPUs means some hundred of these on the way to
    # the first worker.
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


def read_bounded(path: str, *, most: int, patience_s: float) -> bytes:
    """Return what the user's file holds, which may also be a pipe (``<(command)``) that is still
    being written.

    Raises OSError: EFBIG for more than ``most`` bytes, ETIMEDOUT if no end has come within
    ``patience_s`` seconds, or if no program has opened a FIFO for writing within ``WRITER_S``; and
    ValueError for a NUL in the name.
    """
    began_s = time.monotonic()
    until_s = began_s + patience_s
    fd = os.open(
        path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    )  # of a FIFO, the opening itself would wait
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        data = bytearray()
        while len(data) <= most:
            now_s = time.monotonic()
            if now_s >= until_s:
                raise OSError(errno.ETIMEDOUT, f"no end of it came within {patience_s:g} s")
            is_ready = bool(poll.poll(min(until_s - now_s, WRITER_S) * 1000))
            with suppress(BlockingIOError):
                chunk = os.read(fd, _LONGEST)
                data += chunk
                if (
                    chunk or not is_ready
                ):  # without an end that was seen: no program has a FIFO open for writing
                    if not data and time.monotonic() >= began_s + WRITER_S:
                        raise OSError(
                            errno.ETIMEDOUT, f"no program writes to it (waited {WRITER_S:g} s)"
                        )
                    continue
                return bytes(data)
            time.sleep(_STEP_S)
        raise OSError(errno.EFBIG, f"it has more than {_size(most)}")
    finally:
        os.close(fd)


def read_int(path: str) -> int | None:
    """Return the one number that a file holds, or None."""
    return parse_int(read_text(path))


def parse_int(text: str | None) -> int | None:
    """Return the number that ``text`` is, or None."""
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        return None


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Read the kernel's list format (``0-3,8``; also empty), ascending; what is no range is
    skipped."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        low, high = parse_int(first), parse_int(last or first)
        if low is not None and high is not None:
            cpus.update(range(low, high + 1))
    return tuple(sorted(cpus))


def under(root: str, path: str) -> str:
    """Return the absolute ``path`` as seen below ``root``."""
    return path if root == "/" else root.rstrip("/") + path


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count:,} bytes"
