"""Requests to the launcher of a running job, and its answers: one line of JSON each.

The launcher listens at a Unix socket, whose path follows from that of the run directory.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from typing import Any

from distlaunch.core.errors import LaunchError
from distlaunch.core.model.record import Record

SCHEMA = 1
"""Increased when a field changes its meaning or is removed."""
LONGEST_REQUEST = 64 << 10
"""Bytes of a request, with its newline."""
_BASES = ("/tmp", "/var/tmp")  # noqa: S108 - the directory in it is checked
"""Not TMPDIR: launcher and clients may have different ones, and the path of a Unix socket has at
most 107 bytes."""
_NAME_BYTES = 12


class ControlRefusal(Enum):
    """Why a launcher does not answer a request."""

    MALFORMED = "malformed"
    """The request is no JSON object with a known schema number, or too long."""
    UNKNOWN = "unknown"
    """The launcher does not know such requests."""
    BUSY = "busy"
    """The launcher has too many connections."""
    ENDING = "ending"
    """The job has ended, and the launcher is about to exit."""
    FAILED = "failed"
    """The request is wrong, or cannot be answered now. The text says why."""


class ControlRequest(Record):
    """A question or an order for the launcher."""

    kind: str
    fields: Mapping[str, Any]

    def line(self) -> bytes:
        """Return the request as it is sent."""
        return _to_line({**self.fields, "schema": SCHEMA, "request": self.kind})


class ControlError(LaunchError):
    """The launcher has refused a request, or a request or an answer is malformed."""

    def __init__(self, refusal: ControlRefusal, text: str) -> None:
        super().__init__(text)
        self.refusal = refusal


def read_request(line: bytes) -> ControlRequest:
    """Return the request in a line. Raises ControlError if it is none."""
    value = _read_object(line)
    kind = value.pop("request", None)
    if value.pop("schema", None) != SCHEMA or not isinstance(kind, str):
        raise ControlError(
            ControlRefusal.MALFORMED, f"a request needs the fields schema ({SCHEMA}) and request"
        )
    return ControlRequest(kind=kind, fields=value)


def result_line(result: object) -> bytes:
    """Return an answer as it is sent. ``result`` is plain data."""
    return _to_line({"schema": SCHEMA, "result": result})


def refusal_line(refusal: ControlRefusal, text: str) -> bytes:
    """Return the answer that refuses a request."""
    return _to_line({"schema": SCHEMA, "error": {"kind": refusal.value, "text": text}})


def read_result(line: bytes) -> Any:
    """Return the result in an answer. Raises ControlError for a refusal or an invalid answer."""
    answer = _read_object(line)
    match answer if answer.get("schema") == SCHEMA else None:
        case {"result": result}:
            return result
        case {"error": {"kind": str(kind), "text": str(text)}}:
            known = {each.value: each for each in ControlRefusal}
            raise ControlError(known.get(kind, ControlRefusal.FAILED), text)
        case _:
            raise ControlError(
                ControlRefusal.MALFORMED, "the answer is of another version of distlaunch"
            )


def control_directories() -> list[str]:
    """Return the directories in which this user's sockets may be, the preferred one first."""
    return [os.path.join(base, f"distlaunch-{os.getuid()}") for base in _BASES]


def is_private(directory: str) -> bool:
    """Return whether a directory belongs to this user, and nobody else can enter it."""
    try:
        found = os.lstat(directory)
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.getuid()
        and not stat.S_IMODE(found.st_mode) & 0o077
    )


def socket_name(run_dir: str) -> str:
    """Return the name of the socket of the job with this run directory."""
    from hashlib import sha256

    whole = os.fsencode(os.path.realpath(run_dir))
    return sha256(whole).hexdigest()[: 2 * _NAME_BYTES]


def is_socket_name(name: str) -> bool:
    """Return whether a file name is the name of a control socket, also of one that is being opened.

    The directory may also have lock files of ports.
    """
    job, dot, pid = name.partition(".")
    return (
        len(job) == 2 * _NAME_BYTES
        and not job.strip("0123456789abcdef")
        and (pid.isdecimal() if dot else True)
    )


def remove_socket(path: str) -> None:
    """Remove a socket. A file of another kind, which refuses connections as well, is kept."""
    with suppress(OSError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)


def _to_line(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"


def _read_object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ControlError(ControlRefusal.MALFORMED, "this is no JSON object")
    return value
