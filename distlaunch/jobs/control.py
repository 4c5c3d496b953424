"""Ask the launcher of a running job by its control socket."""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Any

from distlaunch.core.protocol.control_messages import (
    ControlRequest,
    control_directories,
    is_private,
    read_result,
    remove_socket,
    socket_name,
)

ANSWER_S = 2.0
"""A suspended launcher does not answer."""
_BLOCK = 1 << 16


class NoControlError(Exception):
    """No launcher answers at the control socket of a job."""


class NoSocketError(NoControlError):
    """The job has no control socket here."""


def ask(run_dir: str, kind: str, *, timeout_s: float = ANSWER_S, **fields: object) -> Any:
    """Send a request to the launcher of a job, and return the result.

    Raises NoControlError if no launcher answers in time, and ControlError if it refuses.
    """
    until = time.monotonic() + timeout_s
    with connect(run_dir, timeout_s=timeout_s) as connection:
        return ask_at(connection, kind, timeout_s=until - time.monotonic(), **fields)


def connect(run_dir: str, *, timeout_s: float = ANSWER_S) -> socket.socket:
    """Connect to the control socket of a job, or raise NoControlError.

    The error is NoSocketError if there is no socket. A socket that a killed launcher has left is
    removed.
    """
    name = socket_name(run_dir)
    is_there = False
    for directory in control_directories():
        if not is_private(directory):
            continue
        path = os.path.join(directory, name)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # With settimeout, connect would not wait for room in the launcher's queue.
        seconds = int(timeout_s)
        limit = struct.pack("ll", seconds, int((timeout_s - seconds) * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            connection.connect(path)
        except ConnectionRefusedError:
            remove_socket(path)
        except FileNotFoundError:
            pass
        except OSError:
            is_there = True
        else:
            return connection
        connection.close()
    raise NoControlError(run_dir) if is_there else NoSocketError(run_dir)


def ask_at(
    connection: socket.socket, kind: str, *, timeout_s: float = ANSWER_S, **fields: object
) -> Any:
    """Send a request over a connection, and return the result. Raises as ``ask``."""
    until = time.monotonic() + timeout_s
    answer = bytearray()
    try:
        connection.settimeout(max(0.001, timeout_s))
        connection.sendall(ControlRequest(kind=kind, fields=fields).line())
        while not answer.endswith(b"\n"):
            connection.settimeout(max(0.001, until - time.monotonic()))
            block = connection.recv(_BLOCK)
            if not block:
                raise NoControlError("the launcher has closed the connection")
            answer += block
    except OSError as exc:
        raise NoControlError(str(exc)) from exc
    return read_result(bytes(answer))
