"""What every connection between launchers is set to."""

from __future__ import annotations

import socket

_IDLE_S, _INTERVAL_S, _PROBES = 10, 5, 3
_UNANSWERED_MS = 30_000
"""Twice what the pings take to find a silent network: this only frees whoever is stuck in ``send``."""


def tune(connection: socket.socket) -> None:
    """Send small messages at once, and let a network that has gone silent end the connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
