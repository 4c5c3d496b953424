"""Layer toolkit: tell the launcher how far this worker is. The protocol is a line of JSON: ``PROGRESS.md``."""

from __future__ import annotations

import os
from time import monotonic

from distlaunch.core.model.variables import PROGRESS_FD

EVERY_S = 0.5
"""The least time between two lines; calls in between cost next to nothing."""
LINE_BYTES = 4096
"""What the kernel writes to a pipe in one piece (PIPE_BUF), and the longest line that the launcher reads."""

_next = 0.0
_descriptor = -1
_pipe: tuple[int, int] | None = None
"""Device and inode of the launcher's pipe, once it has been found."""


def heartbeat(**values: object) -> None:
    """Report numbers: ``heartbeat(step=step, loss=loss, samples=seen)``. Cheap enough to call at every step.

    At most two calls a second send anything, and only these turn values into numbers, so that a tensor on a GPU is not
    waited for at the others. ``step`` tells the launcher how far the job is; every call that is sent says that it is
    alive, even with no values. Never raises, never waits, does nothing where no launcher listens.
    """
    if monotonic() >= _next:
        _send(values)


def _send(values: dict[str, object]) -> None:
    global _next  # noqa: PLW0603 - one pipe a process
    _next = monotonic() + EVERY_S
    try:
        if not _is_ours():
            _next = float("inf")
            return
        os.write(_descriptor, _line(values))
    except BlockingIOError:
        pass  # full: the launcher has not come to read it
    except Exception:  # noqa: BLE001 - the launcher is gone, or the pipe was closed: never the script's trouble
        _next = float("inf")


def _is_ours() -> bool:
    """Tell whether the descriptor is the launcher's pipe: the script may have closed it and opened its own files."""
    global _descriptor, _pipe  # noqa: PLW0603 - one pipe a process
    if _pipe is None:
        import fcntl

        _descriptor = int(os.environ.get(PROGRESS_FD, "-1"))
        flags = fcntl.fcntl(_descriptor, fcntl.F_GETFL) if _descriptor >= 0 else 0
        if flags & (os.O_WRONLY | os.O_RDWR) != os.O_WRONLY or not flags & os.O_NONBLOCK:
            return False
    found = os.fstat(_descriptor)
    if found.st_mode & 0o170000 != 0o010000:  # no FIFO
        return False
    if _pipe is None:
        _pipe = found.st_dev, found.st_ino
    return _pipe == (found.st_dev, found.st_ino)


def _line(values: dict[str, object]) -> bytes:
    """Write what can be a number; values too many for one line are left out, the last ones first."""
    import json

    parts: list[str] = []
    size = len("{}\n")
    for name, value in values.items():
        try:
            number = value if type(value) is int else float(value)  # type: ignore[arg-type]
            part = f"{json.dumps(name)}: {number!r}"
        except Exception:  # noqa: BLE001, S112 - no number, or one of thousands of digits
            continue
        size += len(part) + 2
        if size > LINE_BYTES:
            break
        if number - number == 0:  # JSON has neither NaN nor infinity
            parts.append(part)
    return ("{" + ", ".join(parts) + "}\n").encode()
