"""A port to listen on, for callers from other machines."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence

from distlaunch.core.agent.node.ports import hold_port
from distlaunch.core.errors import ConfigError

_BACKLOG = 4096
_WILDCARD = ("::", "0.0.0.0")  # noqa: S104 - other nodes call, by addresses that we do not know
_LOOPBACK = ("127.0.0.1", "::1")
_TRIES = 8
_NO_SUCH_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)


class PortTakenError(ConfigError):
    """Another process listens on the port."""


def open_port(host: str, ports: Sequence[int], *, owner: str) -> list[socket.socket]:
    """Listen on the first of the ports that is free; all sockets have the same one. Port 0 is any.

    An address of this machine is taken at its word, ``localhost`` stands for both of the loopback's; for a name we
    listen on all addresses, as it may stand for another one here than elsewhere.

    Raises PortTakenError, with the process that has the port, if a port is in use; ConfigError if no port can be used
    for another reason.
    """
    problems: list[ConfigError] = []
    for port in ports:
        try:
            return _listen(host, port)
        except OSError as exc:
            problems.append(_refused(port, exc, owner))
    if len(problems) == 1:
        raise problems[0]
    numbers = ", ".join(map(str, ports))
    kind = PortTakenError if any(isinstance(one, PortTakenError) for one in problems) else ConfigError
    raise kind(f"none of the ports {numbers} can be had: {'; '.join(one.message for one in problems[:4])}")


def _listen(host: str, port: int) -> list[socket.socket]:
    if host == "localhost":
        return _on_loopback(port)
    if _is_address(host) and host not in _WILDCARD:
        try:
            return [_socket(host, port)]
        except OSError as exc:
            if exc.errno not in _NO_SUCH_FAMILY:
                raise  # else callers get to us by an address that is translated on the way
    try:
        return [_socket(_WILDCARD[0], port)]
    except OSError as exc:
        if exc.errno not in _NO_SUCH_FAMILY:
            raise
        return [_socket(_WILDCARD[1], port)]


def _on_loopback(port: int) -> list[socket.socket]:
    for tries in range(_TRIES):
        first = _socket(_LOOPBACK[0], port)
        try:
            return [first, _socket(_LOOPBACK[1], first.getsockname()[1])]
        except OSError as exc:
            if exc.errno in _NO_SUCH_FAMILY:
                return [first]
            first.close()
            if port or tries == _TRIES - 1:
                raise
    raise AssertionError


def _socket(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # What connections of an earlier launcher have left does not matter; beside another listener Linux lets nobody.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address != _WILDCARD[0]))
        listening.bind((address, port))
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def _is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except (OSError, ValueError):  # ValueError: no text for C
            continue
        return True
    return False


def _refused(port: int, exc: OSError, owner: str) -> ConfigError:
    hint = "name another port: --rendezvous HOST:PORT, on all nodes"
    if exc.errno in (errno.EADDRINUSE, errno.EACCES):
        kind = PortTakenError if exc.errno == errno.EADDRINUSE else ConfigError
        try:
            hold_port(port, owner=owner).release()
        except ConfigError as found:  # it knows who has it
            return kind(found.message, hint=hint)
        return kind(f"port {port} is in use", hint=hint)
    return ConfigError(f"nobody can listen on port {port} here: {os.strerror(exc.errno or 0)}", hint=hint)
