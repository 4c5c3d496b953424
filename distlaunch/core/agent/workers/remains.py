"""What falls to the agent as a subreaper: reaped, and killed where it stems from workers."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from distlaunch.core.agent.workers import process_tree

_STEP_S = 0.002


class Remains:
    """Knows the children that this process was started with: a script that ends in ``exec distlaunch`` has helpers."""

    def __init__(self, child: int) -> None:
        self._child = child
        self._strangers = frozenset(process_tree.children_of(os.getpid())) - {child}

    def await_child(self, *, bound_s: float) -> int | None:
        """Reap the child of ours when it has ended, and return its wait status; None: it has not within the bound."""
        deadline = time.monotonic() + bound_s
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(self._child, os.WNOHANG)
                if pid:
                    return status
                if time.monotonic() > deadline:
                    break
                time.sleep(_STEP_S)
        return None

    def kill(self, *, bound_s: float) -> int | None:
        """Kill and reap what has fallen to us, the child of ours included; return its wait status if it was seen."""
        deadline = time.monotonic() + bound_s
        status = None
        while True:
            seen = self._reap()
            status = seen if status is None else status
            children = [pid for pid in process_tree.children_of(os.getpid()) if pid not in self._strangers]
            if not children or time.monotonic() > deadline:
                return status
            process_tree.kill_each_tree(children)
            time.sleep(_STEP_S)

    def _reap(self) -> int | None:
        status = None
        with suppress(ChildProcessError):
            while True:
                pid, found = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._child:
                    status = found
        return status

    def reap_adopted(self) -> None:
        """Reap what is not ours to watch: as a container's first process we are given every orphan."""
        for pid in process_tree.children_of(os.getpid()):
            if pid != self._child:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
