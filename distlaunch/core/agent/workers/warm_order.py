"""A worker that the warm server is to fork, as the spawner keeps it and as the server gets it."""

from __future__ import annotations

import marshal
import os
from collections.abc import Mapping

from distlaunch.core.protocol import spawner_messages as w


class Order:
    """A worker that is to be forked by the server."""

    def __init__(self, spawn: w.Spawn, setup: w.Setup, descriptors: list[int]) -> None:
        self.spawn = spawn
        self.setup = setup
        self.descriptors = descriptors
        self.go = -1
        """Our end of the pipe on which its process, once forked, waits for our word."""
        self.pid = 0
        """Of that process, once the server has told of it; it is a child of ours then."""
        self.is_up = False
        """That process has set itself up."""

    def close(self) -> None:
        """Let go of its descriptors; a process that waits for our word on one of them then ends."""
        for descriptor in (*self.descriptors, self.go):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptors = []
        self.go = -1

    def encoded(self, serial: int, old_env: Mapping[str, str]) -> bytes:
        """Encode it for the server, whose own environment was ``old_env``."""
        spawn, setup = self.spawn, self.setup
        changes = changed_variables(old_env, {**setup.env, **spawn.env})
        return marshal.dumps((serial, os.getpid(), changes, setup.cwd, spawn.descriptors, spawn.cpus, spawn.terminal))


def changed_variables(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str | None]:
    """Give what turns one environment into the other; None where a variable goes."""
    changes: dict[str, str | None] = {name: None for name in old if name not in new}
    changes.update((name, value) for name, value in new.items() if old.get(name) != value)
    return changes
