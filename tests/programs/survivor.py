"""Let a test see when this program and all its descendants are gone.

``hold()`` opens the FIFO that the test reads and hands it down: the reader sees its end only when the last holder is
gone. Descendants made with ``subprocess`` need ``close_fds=False`` or ``pass_fds=(survivor.hold(),)``.
"""

from __future__ import annotations

import os

_held: int | None = None


def hold() -> int:
    """Open the FIFO once, inheritable, say so in it, and return its descriptor (-1 outside a test)."""
    global _held
    if _held is None:
        path = os.environ.get("SURVIVOR_FIFO")
        if path is None:
            return -1
        _held = os.open(path, os.O_WRONLY)
        os.set_inheritable(_held, True)
        os.write(_held, b"%d\n" % os.getpid())
    return _held
