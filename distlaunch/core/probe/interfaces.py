"""Layer core.probe: the addresses of this machine's network interfaces, asked of the kernel by rtnetlink(7).

No name is resolved and nothing leaves the machine. The kernel answers for the network namespace that we are in, so a
container sees its own addresses.
"""

from __future__ import annotations

import socket
import struct

_HEADER = struct.Struct("=IHHII")
"""nlmsghdr: length, type, flags, sequence number, port id."""
_ADDRESS = struct.Struct("=BBBBI")
"""ifaddrmsg: family, prefix length, flags, scope, interface index."""
_ATTRIBUTE = struct.Struct("=HH")
"""rtattr: length with this head, type."""
_NEWADDR, _GETADDR = 20, 22
_ERROR, _DONE = 2, 3
_DUMP_REQUEST = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_SIZES: dict[int, int] = {socket.AF_INET: 4, socket.AF_INET6: 16}
"""Bytes of an address, by family."""
_DATAGRAM = 1 << 16
_MOST_DATAGRAMS = 1024
_PATIENCE_S = 1.0


def probe_addresses() -> tuple[str, ...]:
    """Return the IPv4 and IPv6 addresses of all interfaces, loopback too; none where the kernel does not tell."""
    # Some sandboxes refuse this family of sockets: then hosts are known by name only.
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as kernel:
            kernel.settimeout(_PATIENCE_S)
            request = _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
            kernel.sendto(_HEADER.pack(_HEADER.size + len(request), _GETADDR, _DUMP_REQUEST, 1, 0) + request, (0, 0))
            found: dict[str, None] = {}
            for _ in range(_MOST_DATAGRAMS):
                addresses, done = parse_addresses(kernel.recv(_DATAGRAM))
                found.update(dict.fromkeys(addresses))
                if done:
                    break
    except OSError:
        return ()
    return tuple(found)


def parse_addresses(datagram: bytes) -> tuple[list[str], bool]:
    """Read one datagram of the kernel's answer: the addresses in it, and whether it is the last."""
    found: list[str] = []
    at = 0
    while at + _HEADER.size <= len(datagram):
        length, kind, _, _, _ = _HEADER.unpack_from(datagram, at)
        if kind in {_DONE, _ERROR} or length < _HEADER.size:
            return found, True
        if kind == _NEWADDR:
            found += _address(datagram[at + _HEADER.size : at + length])
        at += _aligned(length)
    return found, False


def _address(message: bytes) -> list[str]:
    """Give the one address of a message; on a point-to-point link that is our end, not the peer's."""
    if len(message) < _ADDRESS.size:
        return []
    family: int = _ADDRESS.unpack_from(message)[0]
    attributes: dict[int, bytes] = {}
    at = _ADDRESS.size
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if length < _ATTRIBUTE.size:
            break
        attributes[kind] = message[at + _ATTRIBUTE.size : at + length]
        at += _aligned(length)
    raw = attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS, b""))
    return [socket.inet_ntop(family, raw)] if len(raw) == _SIZES.get(family) else []


def _aligned(length: int) -> int:
    return (length + 3) & ~3
