"""Find the processes that started this one."""

from __future__ import annotations

import os
from collections.abc import Iterator

from distlaunch.core.model.record import Record

_MOST_BYTES = 1 << 16
_MOST = 64
"""Largest number of processes to read. A longer chain means that /proc changed meanwhile."""


class Ancestor(Record):
    """One process that started this one, or its ancestor. ``name`` is its command name as in
    ``ps``."""

    name: str
    argv: tuple[str, ...]


def ancestors() -> Iterator[Ancestor]:
    """Yield the parent process, its parent, and so on, as far as they can be read."""
    pid = os.getppid()
    for _ in range(_MOST):
        if pid <= 0:
            return
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                head, _, rest = file.read(_MOST_BYTES).rpartition(b")")
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                arguments = file.read(_MOST_BYTES).rstrip(b"\0").split(b"\0")
        except OSError:
            return
        name = head.partition(b"(")[2].decode(errors="surrogateescape")
        yield Ancestor(
            name=name,
            argv=tuple(argument.decode(errors="surrogateescape") for argument in arguments),
        )
        pid = int(rest.split()[1])
