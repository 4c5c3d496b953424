"""Layer core.agent: what falls to the agent as a subreaper: reaped, and killed where it stems from workers."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from distlaunch.core.agent import tree

_STEP_S = 0.002


class Remains:
    """Knows the children that this process was started with: a script that ends in ``exec distlaunch`` has helpers."""

    def __init__(self, spawner: int) -> None:
        self._spawner = spawner
        self._strangers = frozenset(tree.children_of(os.getpid())) - {spawner}

    def kill(self, *, bound_s: float) -> int | None:
        """Kill and reap what has fallen to us, the spawner included; give the spawner's wait status if it was seen."""
        deadline = time.monotonic() + bound_s
        status = None
        while True:
            seen = self._reap()
            status = seen if status is None else status
            children = [pid for pid in tree.children_of(os.getpid()) if pid not in self._strangers]
            if not children or time.monotonic() > deadline:
                return status
            tree.kill_each_tree(children)
            time.sleep(_STEP_S)

    def _reap(self) -> int | None:
        status = None
        with suppress(ChildProcessError):
            while True:
                pid, found = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._spawner:
                    status = found
        return status

    def reap_adopted(self) -> None:
        """Reap what is not ours to watch: as a container's first process we are given every orphan."""
        for pid in tree.children_of(os.getpid()):
            if pid != self._spawner:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
