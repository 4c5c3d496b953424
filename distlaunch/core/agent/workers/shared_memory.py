"""Files that workers leave in shared memory, which nobody else would remove before the machine
ends.

Only exact names that hold the master's address and port, so those of this job, and only while its
attempt lasts: then the port may be another job's.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from distlaunch.core.protocol import agent_messages as m

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where shm_open makes its files; we make none


def shared_memory_names(start: m.Start, *, owner: int) -> tuple[str, ...]:
    """Return the names of what the workers of this node may leave, whose user id is ``owner``."""
    address, port = start.env.get("MASTER_ADDR", ""), start.env.get("MASTER_PORT", "")
    every = (
        name.format(uid=owner, address=address, port=port, rank=spec.rank)
        for spec in start.workers
        for name in start.shared_memory
    )
    return tuple(dict.fromkeys(every))


class SharedMemoryFiles:
    """What an attempt's workers may leave; to be removed once, when the last of them is gone."""

    def __init__(self, *, owner: int, folder: str = _SHARED_MEMORY) -> None:
        self._owner = owner
        self._folder = folder
        self._names: tuple[str, ...] = ()

    def expect(self, names: tuple[str, ...]) -> None:
        """Take the names of another attempt; none: it is over, and they may be somebody else's."""
        self._names = names

    def remove(self) -> None:
        """Remove what is there of it: regular files that belong to ``owner``."""
        for name in self._names:
            path = os.path.join(self._folder, name)
            with suppress(OSError):
                found = os.lstat(path)
                if "/" not in name and stat.S_ISREG(found.st_mode) and found.st_uid == self._owner:
                    os.unlink(path)
        self._names = ()
