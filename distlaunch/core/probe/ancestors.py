"""Which processes started this one, the nearest first."""

from __future__ import annotations

import os
from collections.abc import Iterator

from distlaunch.core.model.record import Record

_MOST_BYTES = 1 << 16
_MOST = 64
"""Processes from here to the first one; more means that /proc changes under us."""


class Ancestor(Record):
    """One process. ``name`` is what ``ps`` shows as the command, ``argv`` its command line as far
    as it can be read."""

    name: str
    argv: tuple[str, ...]


def ancestors() -> Iterator[Ancestor]:
    """Return our parent, its parent, and so on, until one cannot be read."""
    pid = os.getppid()
    for _ in range(_MOST):
        if pid <= 0:
            return
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                head, _, rest = file.read(_MOST_BYTES).rpartition(b")")
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read(_MOST_BYTES).rstrip(b"\0").split(b"\0")
        except OSError:
            return
        name = head.partition(b"(")[2].decode(errors="surrogateescape")
        yield Ancestor(
            name=name, argv=tuple(word.decode(errors="surrogateescape") for word in words)
        )
        pid = int(rest.split()[1])
