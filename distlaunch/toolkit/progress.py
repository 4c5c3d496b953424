"""``heartbeat``: report a worker's progress to the launcher.

The protocol is one line of JSON on a pipe; ``docs/progress.md`` describes it.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic, sleep

from distlaunch.core.model.variables import PROGRESS_FD

INTERVAL_S = 0.5
"""Least time between two lines. Calls in between cost almost nothing."""
MAX_LINE_BYTES = 4096
"""PIPE_BUF, which the kernel writes atomically, and the launcher's limit."""
_FULL_S, _RETRY_S = 1.5, 0.05

_next_send_at = 0.0
_descriptor = -1
_pipe: tuple[int, int] | None = None
"""Device and inode of the launcher's pipe, once it has been checked."""
_owner_pid = 0
"""A forked child registers an exit handler of its own."""
_sent: dict[str, float] = {}
_step: object = None


def heartbeat(**values: object) -> None:
    """Report numbers, as in ``heartbeat(step=step, loss=loss, samples=seen)``.

    May be called at every step. At most two calls per second send something, and only these convert
    their values, so that other calls do not wait for a tensor on a GPU. ``step`` is the job's
    progress. Any call, even without values, shows that the worker is alive. If the newest ``step``
    was not sent, it is sent when Python exits. ``heartbeat`` never raises and never blocks. Without
    a launcher it does nothing.
    """
    global _step  # noqa: PLW0603 - one pipe a process
    if monotonic() >= _next_send_at:
        _send_values(values)
    elif "step" in values:
        _step = values["step"]


def _send_values(values: dict[str, object]) -> None:
    global _next_send_at, _step, _sent, _owner_pid  # noqa: PLW0603 - one pipe a process
    _next_send_at = monotonic() + INTERVAL_S
    try:
        if not _is_launcher_pipe():
            _next_send_at = float("inf")
            return
        if _owner_pid != os.getpid():
            atexit.register(_send_last)
            _owner_pid = os.getpid()
        _sent, _step = _finite_numbers(values), values.get("step")
        os.write(_descriptor, _json_line(_sent))
        _step = None
    except BlockingIOError:
        pass  # the pipe is full: the launcher has not read it yet
    except Exception:  # noqa: BLE001 - the launcher is gone or the pipe was closed: no error of the script
        _next_send_at = float("inf")


def _send_last() -> None:
    """Send the newest step at exit, unless it is a tensor, which could block."""
    if _owner_pid == os.getpid() and type(_step) in (int, float):
        with suppress(Exception):
            if _is_launcher_pipe():
                os.write(_descriptor, _json_line(_finite_numbers({**_sent, "step": _step})))


def report_checkpoint(*, step: int, seconds: float, size: int) -> None:
    """Report a complete checkpoint to the launcher, if there is one.

    ``step`` is the number of completed steps, ``size`` in bytes. If the pipe is full, wait for at
    most ``_FULL_S``.
    """
    with suppress(Exception):  # a report is never an error of the script
        until = monotonic() + _FULL_S
        values = {"step": step, "seconds": round(seconds, 3), "bytes": size}
        line = b'{"checkpoint": %b}\n' % _json_line(values).strip()
        while _is_launcher_pipe():
            try:
                os.write(_descriptor, line)
            except BlockingIOError:
                if monotonic() >= until:
                    return
                sleep(_RETRY_S)
            else:
                return


def _is_launcher_pipe() -> bool:
    """Return whether there is a pipe to the launcher. Find it on the first call. Later, check that
    the script has not closed it and opened another file with the same number."""
    global _descriptor, _pipe  # noqa: PLW0603 - one pipe a process
    if _pipe is None:
        import fcntl

        _descriptor = int(os.environ.get(PROGRESS_FD, "-1"))
        flags = fcntl.fcntl(_descriptor, fcntl.F_GETFL) if _descriptor >= 0 else 0
        if flags & (os.O_WRONLY | os.O_RDWR) != os.O_WRONLY or not flags & os.O_NONBLOCK:
            return False
    found = os.fstat(_descriptor)
    if found.st_mode & 0o170000 != 0o010000:  # not a FIFO
        return False
    if _pipe is None:
        _pipe = found.st_dev, found.st_ino
    return _pipe == (found.st_dev, found.st_ino)


def _finite_numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Return the finite numbers, without booleans."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if type(value) is bool:
            continue
        try:
            # torch warns if a tensor with a gradient is converted.
            if (detach := getattr(value, "detach", None)) is not None:
                value = detach()  # noqa: PLW2901 - the same number
            number = value if type(value) is int else float(value)  # type: ignore[arg-type]
            if number - number == 0:  # JSON has neither NaN nor infinity
                numbers[name] = number
        except Exception:  # noqa: BLE001, S112 - no number
            continue
    return numbers


def _json_line(numbers: Mapping[str, float]) -> bytes:
    """Return a line of JSON, without the last numbers if it would be too long."""
    import json

    parts: list[str] = []
    size = len("{}\n")
    for name, number in numbers.items():
        try:
            part = f"{json.dumps(name)}: {number!r}"
        except ValueError:  # thousands of digits
            continue
        size += len(part) + 2
        if size > MAX_LINE_BYTES:
            break
        parts.append(part)
    return ("{" + ", ".join(parts) + "}\n").encode()
