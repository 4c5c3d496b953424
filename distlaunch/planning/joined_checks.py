"""Check numbers, names and addresses that the launchers of a job send each other. No I/O."""

from __future__ import annotations

from distlaunch.core.errors import ProtocolError
from distlaunch.core.protocol import launcher_messages as p

MOST_SLOTS = 1 << 12
"""Largest number of workers of one launcher."""
_MOST_NODES = 1 << 17
_LONGEST_NAME = 255


def is_address(text: str) -> bool:
    """Return whether ``text`` has the form of a host name or an address."""
    plain = all(char.isascii() and (char.isalnum() or char in "._-:%") for char in text)
    return plain and 0 < len(text) <= _LONGEST_NAME and not text.startswith("-")


def _is_host_and_port(text: str) -> bool:
    """Return whether the text can be ``HOST:PORT``, with brackets around an IPv6 address."""
    host, _, port = text.rpartition(":")
    numeric = port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) <= 65535
    return numeric and is_address(host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host)


def check_start(start: p.StartWorkers, *, nodes: tuple[int, int]) -> None:
    """Raise ProtocolError for invalid values of a start message. ``nodes``: smallest and largest
    number of nodes."""
    count, (fewest, most) = len(start.hosts), nodes
    is_valid = (
        fewest <= count <= min(most, _MOST_NODES)
        and len(start.slots) == count
        and 0 <= start.node_rank < count
        and all(0 < slots <= MOST_SLOTS for slots in start.slots)
        and 0 < start.master_port <= 65535
        and is_address(start.master_addr)
        and p.is_possible_attempt(start.attempt, start.restarts)
        and all(len(host) <= _LONGEST_NAME and host.isprintable() for host in start.hosts)
        and all(map(_is_host_and_port, start.cluster))
    )
    if not is_valid:
        raise ProtocolError("it sends a start message with impossible values")
