"""Tell the launcher how far this worker is.

The protocol, a line of JSON, is in ``docs/progress.md``.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic

from distlaunch.core.model.variables import PROGRESS_FD

EVERY_S = 0.5
"""The least time between two lines; calls in between cost next to nothing."""
LINE_BYTES = 4096
"""What the kernel writes to a pipe in one piece (PIPE_BUF), and the longest line that the launcher
reads."""

_next = 0.0
_descriptor = -1
_pipe: tuple[int, int] | None = None
"""Device and inode of the launcher's pipe, once it has been found."""
_owner = 0
"""The process that has sent something; a forked one is another."""
_sent: dict[str, float] = {}
_step: object = None
"""The newest step, if it has not been sent."""


def heartbeat(**values: object) -> None:
    """Report numbers: ``heartbeat(step=step, loss=loss, samples=seen)``. Cheap enough to call at
    every step.

    At most two calls a second send anything, and only these turn values into numbers, so that a
    tensor on a GPU is not waited for at the others. ``step`` tells the launcher how far the job is;
    every call that is sent says that it is alive, even with no values. A newest ``step`` that has
    not been sent is when Python ends. Whatever the values, it never raises, never waits, and does
    nothing where no launcher listens.
    """
    global _step  # noqa: PLW0603 - one pipe a process
    if monotonic() >= _next:
        _send(values)
    elif "step" in values:
        _step = values["step"]


def _send(values: dict[str, object]) -> None:
    global _next, _step, _sent, _owner  # noqa: PLW0603 - one pipe a process
    _next = monotonic() + EVERY_S
    try:
        if not _is_ours():
            _next = float("inf")
            return
        if _owner != os.getpid():
            atexit.register(_send_last)
            _owner = os.getpid()
        _sent, _step = _numbers(values), values.get("step")
        os.write(_descriptor, _line(_sent))
        _step = None
    except BlockingIOError:
        pass  # full: the launcher has not come to read it
    except Exception:  # noqa: BLE001 - the launcher is gone, or the pipe was closed: never the script's trouble
        _next = float("inf")


def _send_last() -> None:
    """Send the newest step when Python ends, for it tells how far this attempt came. A tensor is
    not waited for."""
    if _owner == os.getpid() and type(_step) in (int, float):
        with suppress(Exception):
            if _is_ours():
                os.write(_descriptor, _line(_numbers({**_sent, "step": _step})))


def _is_ours() -> bool:
    """Return whether the descriptor is the launcher's pipe: the script may have closed it and opened
    its own files."""
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


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Keep what can be a number, but for truth values."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if type(value) is bool:
            continue
        try:
            if (
                detach := getattr(value, "detach", None)
            ) is not None:  # torch warns where a gradient is wanted
                value = detach()  # noqa: PLW2901 - the same number
            number = value if type(value) is int else float(value)  # type: ignore[arg-type]
            if number - number == 0:  # JSON has neither NaN nor infinity
                numbers[name] = number
        except Exception:  # noqa: BLE001, S112 - no number
            continue
    return numbers


def _line(numbers: Mapping[str, float]) -> bytes:
    """Write a line of JSON; numbers too many for it are left out, the last ones first."""
    import json

    parts: list[str] = []
    size = len("{}\n")
    for name, number in numbers.items():
        try:
            part = f"{json.dumps(name)}: {number!r}"
        except ValueError:  # thousands of digits
            continue
        size += len(part) + 2
        if size > LINE_BYTES:
            break
        parts.append(part)
    return ("{" + ", ".join(parts) + "}\n").encode()
