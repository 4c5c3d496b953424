"""Find the resources in the text of an error: files, ports, GPU memory and functions of libraries.
No I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence

from distlaunch.core.model.record import Record

_FRAME = re.compile(r'^\s*File "([^"]+)", line \d+, in (\S+)', re.MULTILINE)
_HEADING = "Traceback (most recent call last)"
_PATH = re.compile(
    r"\[Errno \d+\] [^:\n]+: b?(?:'(?P<single>[^'\n]+)'|\"(?P<double>[^\"\n]+)\")", re.IGNORECASE
)
_PORT = (
    re.compile(r"\bport: (\d{1,5})\b"),
    re.compile(
        r"\[?\b[\w.:-]*\]?:(\d{2,5})\b[^\n]*(?:address already in use|EADDRINUSE)", re.IGNORECASE
    ),
    re.compile(r"address \('[^']*', (\d{1,5})\)"),
    re.compile(r"\bport (\d{2,5})\b", re.IGNORECASE),
)
_OTHER_HOLDS = re.compile(r"Process (\d+) has ([\d.]+) ([GM]iB) memory in use")
_TRIED = re.compile(r"Tried to allocate ([\d.]+) ([KMG]iB)")
_UNALLOCATED = re.compile(r"([\d.]+) ([KMG]iB) is reserved by PyTorch but unallocated")
_MIB = {"KiB": 1 / 1024, "MiB": 1.0, "GiB": 1024.0}
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")


class LibraryCall(Record):
    """One frame of a traceback: the path of the file, and the function."""

    file: str
    function: str


class OtherProcess(Record):
    """Another process with memory of the GPU on which an allocation failed."""

    pid: int
    holds: str
    """The amount of memory as text, such as ``53.16 GiB``."""


def last_calls(output: str) -> tuple[LibraryCall, ...]:
    """Return the frames of the last traceback in a worker's output, outermost first."""
    last = output.rpartition(_HEADING)[2]
    return tuple(LibraryCall(file=file, function=name) for file, name in _FRAME.findall(last))


def path_in(text: str) -> str | None:
    """Return the path in the text of an OSError: ``x`` for ``[Errno 28] No space left on device:
    'x'``; None without a path."""
    found = _PATH.search(text)
    return (found["single"] or found["double"]) if found else None


def port_in(text: str) -> int | None:
    """Return the port that a listener could not get; None if the text names none."""
    for pattern in _PORT:
        if found := pattern.search(text):
            return int(found[1])
    return None


def other_process(text: str) -> OtherProcess | None:
    """Return the other process in torch's out-of-memory message.

    In a container torch may not recognise its own process, and lists it as "Process N". So the
    message must also have "this process".
    """
    found = _OTHER_HOLDS.search(text)
    if found is None or "this process has" not in text:
        return None
    return OtherProcess(pid=int(found[1]), holds=f"{found[2]} {found[3]}")


def is_fragmented(text: str) -> bool:
    """Return whether torch had more unallocated GPU memory in reserve than it tried to allocate, by
    its out-of-memory message."""
    tried, unallocated = _TRIED.search(text), _UNALLOCATED.search(text)
    if tried is None or unallocated is None:
        return False
    return float(unallocated[1]) * _MIB[unallocated[2]] > float(tried[1]) * _MIB[tried[2]]


def package_root(name: str, calls: Sequence[LibraryCall], *, deep: bool) -> str | None:
    """Return the folder in which the user's package ``name`` lies, if a user's file in ``calls`` is
    in a folder of that name.

    Without ``deep``, the file must lie directly in it.
    """
    for call in calls:
        if any(part in call.file for part in _LIBRARIES):
            continue
        root, found, rest = call.file.rpartition(f"/{name}/")
        if found and (deep or "/" not in rest):
            return root or "/"
    return None
