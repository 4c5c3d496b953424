"""Remove files that workers have left in shared memory, which would remain until the machine
restarts.

Only files with known names are removed. The names contain the master's address and port, so they
belong to this job during its attempt. Later, another job may use the port.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from distlaunch.core.protocol import agent_messages as m

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where shm_open makes its files; we make none


def shared_memory_names(start: m.Start, *, owner: int) -> tuple[str, ...]:
    """Return the names of the files that this node's workers may leave. ``owner`` is their user
    id."""
    address, port = start.env.get("MASTER_ADDR", ""), start.env.get("MASTER_PORT", "")
    every = (
        name.format(uid=owner, address=address, port=port, rank=spec.rank)
        for spec in start.workers
        for name in start.shared_memory
    )
    return tuple(dict.fromkeys(every))


class SharedMemoryFiles:
    """The files that an attempt's workers may leave. They are removed after the last worker has
    exited."""

    def __init__(self, *, owner: int, folder: str = _SHARED_MEMORY) -> None:
        self._owner = owner
        self._folder = folder
        self._names: tuple[str, ...] = ()

    def set_names(self, names: tuple[str, ...]) -> None:
        """Set the names for an attempt; none after it, because another job may then use them."""
        self._names = names

    def remove(self) -> None:
        """Remove the regular files with these names that belong to ``owner``, and forget the
        names."""
        for name in self._names:
            path = os.path.join(self._folder, name)
            with suppress(OSError):
                found = os.lstat(path)
                if "/" not in name and stat.S_ISREG(found.st_mode) and found.st_uid == self._owner:
                    os.unlink(path)
        self._names = ()
