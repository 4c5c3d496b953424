"""Ports for tests of launchers and servers on this machine."""

from __future__ import annotations

import random
import socket

_PORTS = range(20_000, 32_000)
"""Below Linux's range for outgoing connections (32768 to 60999 unless configured).

A port of that range may be taken by any outgoing connection until the test listens there. A client
that calls it again and again may even connect to itself.
"""


def free_port() -> int:
    """Return the number of a TCP port at which nothing listens, on any address."""
    while True:
        number = random.choice(_PORTS)
        with socket.socket(socket.AF_INET6) as probe:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            try:
                probe.bind(("::", number))
            except OSError:
                continue
        return number
