"""Ports for tests of launchers and servers on this machine."""

from __future__ import annotations

import itertools
import os
import random
import socket

_FIRST, _END, _STRETCH = 20_000, 32_000, 1500
"""Below Linux's range for outgoing connections (32768 to 60999 unless configured).

A port of that range may be taken by any outgoing connection until the test listens there. A client
that calls it again and again may even connect to itself. Each process of a test session has a
stretch of its own, from which it takes each port once before it takes one again.
"""


def _stretch() -> list[int]:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = _FIRST + worker * _STRETCH % (_END - _FIRST)
    return random.SystemRandom().sample(range(first, first + _STRETCH), _STRETCH)


_ports = itertools.cycle(_stretch())


def is_free(number: int) -> bool:
    """Return whether a process may listen at this TCP port, on all addresses."""
    with socket.socket(socket.AF_INET6) as probe:
        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended
        try:
            probe.bind(("::", number))
            probe.listen()
        except OSError:
            return False
    return True


def free_port() -> int:
    """Return the number of a TCP port at which nothing listens, on any address."""
    return next(number for number in _ports if is_free(number))
