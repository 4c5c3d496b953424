"""Read the interfaces and addresses of this machine from the kernel, and resolve host names.

rtnetlink(7) gives the addresses of this process's network namespace, so a container gets its own.
Names are resolved in a thread, because a lookup cannot be interrupted.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

_HEADER = struct.Struct("=IHHII")
"""nlmsghdr: length, type, flags, sequence number, port id."""
_ADDRESS = struct.Struct("=BBBBI")
"""ifaddrmsg: family, prefix length, flags, scope, interface index."""
_LINK = struct.Struct("=BxHiII")
"""ifinfomsg: family, device type, interface index, flags, change mask."""
_ATTRIBUTE = struct.Struct("=HH")
"""rtattr: length (including this header), type."""
_NEWLINK, _GETLINK = 16, 18
_NEWADDR, _GETADDR = 20, 22
_ERROR, _DONE = 2, 3
_DUMP_REQUEST = 0x301
_IFLA_IFNAME = 3
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_UP, _RUNNING = 0x1, 0x40
_UNUSABLE = 0x08 | 0x40
"""Flags of an address that another machine has or may have, too (IFA_F_DADFAILED,
IFA_F_TENTATIVE)."""
_SIZES: dict[int, int] = {socket.AF_INET: 4, socket.AF_INET6: 16}
"""Number of bytes of an address, by family."""
_DATAGRAM = 1 << 16
_MOST_DATAGRAMS = 1024
_TIMEOUT_S = 1.0


def probe_addresses() -> tuple[str, ...]:
    """Return the IPv4 and IPv6 addresses of all interfaces, including loopback; none if the kernel
    does not answer."""
    found: dict[str, None] = {}
    for datagram in _request_dump(_GETADDR, _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
        addresses, done = parse_addresses(datagram)
        found.update(dict.fromkeys(addresses))
        if done:
            break
    return tuple(found)


def probe_interfaces() -> tuple[tuple[str, str, int], ...]:
    """Return (interface, address, prefix length) of the addresses that other machines may reach.

    Omits loopback, interfaces that are down or have no carrier, and link-local IPv6 addresses,
    which are ambiguous without an interface. Empty if the kernel does not answer.
    """
    names: dict[int, str] = {}
    for datagram in _request_dump(_GETLINK, _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
        links, done = parse_links(datagram)
        names.update(links)
        if done:
            break
    found: dict[tuple[str, str, int], None] = {}
    for datagram in _request_dump(_GETADDR, _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
        networks, done = parse_networks(datagram)
        found.update(
            ((names[index], address, bits), None)
            for index, address, bits in networks
            if index in names
        )
        if done:
            break
    return tuple(found)


def parse_networks(datagram: bytes) -> tuple[list[tuple[int, str, int]], bool]:
    """Return a datagram's entries (interface index, address, prefix length), and whether the
    datagram is the last one of the kernel's answer.

    Omits addresses that other machines cannot use.
    """
    found: list[tuple[int, str, int]] = []
    for kind, message in _split_messages(datagram):
        if kind == _DONE:
            return found, True
        if kind == _NEWADDR and (address := _read_address(message)) is not None:
            _, bits, flags, _, index = _ADDRESS.unpack_from(message)
            if not flags & _UNUSABLE and _is_for_others(address):
                found.append((index, address, bits))
    return found, False


def parse_addresses(datagram: bytes) -> tuple[list[str], bool]:
    """Return the addresses in a netlink datagram, and whether the datagram is the last one of the
    kernel's answer."""
    found: list[str] = []
    for kind, message in _split_messages(datagram):
        if kind == _DONE:
            return found, True
        if kind == _NEWADDR and (address := _read_address(message)) is not None:
            found.append(address)
    return found, False


def parse_links(datagram: bytes) -> tuple[dict[int, str], bool]:
    """Return the interfaces in a netlink datagram that are up and running, as index -> name, and
    whether the datagram is the last one of the kernel's answer."""
    found: dict[int, str] = {}
    for kind, message in _split_messages(datagram):
        if kind == _DONE:
            return found, True
        if kind == _NEWLINK and len(message) >= _LINK.size:
            _, _, index, flags, _ = _LINK.unpack_from(message)
            name = _read_attributes(message, _LINK.size).get(_IFLA_IFNAME, b"").rstrip(b"\0")
            if name and flags & _UP and flags & _RUNNING:
                found[index] = name.decode(errors="replace")
    return found, False


def _request_dump(kind: int, request: bytes) -> Iterator[bytes]:
    """Yield the datagrams of the kernel's answer, as long as it answers."""
    # Some sandboxes refuse this socket family. Hosts are then known by name only.
    try:
        with socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE
        ) as kernel:
            kernel.settimeout(_TIMEOUT_S)
            kernel.sendto(
                _HEADER.pack(_HEADER.size + len(request), kind, _DUMP_REQUEST, 1, 0) + request,
                (0, 0),
            )
            for _ in range(_MOST_DATAGRAMS):
                yield kernel.recv(_DATAGRAM)
    except OSError:
        return


def _split_messages(datagram: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (type, content) of each message. The end, or an error, is ``_DONE``."""
    at = 0
    while at + _HEADER.size <= len(datagram):
        length, kind, _, _, _ = _HEADER.unpack_from(datagram, at)
        if kind in {_DONE, _ERROR} or length < _HEADER.size:
            yield _DONE, b""
            return
        yield kind, datagram[at + _HEADER.size : at + length]
        at += _round_up_to_4(length)


def _read_attributes(message: bytes, at: int) -> dict[int, bytes]:
    attributes: dict[int, bytes] = {}
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if length < _ATTRIBUTE.size:
            break
        attributes[kind] = message[at + _ATTRIBUTE.size : at + length]
        at += _round_up_to_4(length)
    return attributes


def _read_address(message: bytes) -> str | None:
    """Return the address of a message; of a point-to-point interface, the local end."""
    if len(message) < _ADDRESS.size:
        return None
    family: int = _ADDRESS.unpack_from(message)[0]
    attributes = _read_attributes(message, _ADDRESS.size)
    raw = attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS, b""))
    return socket.inet_ntop(family, raw) if len(raw) == _SIZES.get(family) else None


def _is_for_others(address: str) -> bool:
    """Return whether other machines may reach an address: it is not in 127/8, ::1 or fe80::/10."""
    return not (
        address.startswith("127.")
        or address == "::1"
        or address.lower()[:3] in {"fe8", "fe9", "fea", "feb"}
    )


def _round_up_to_4(length: int) -> int:
    return (length + 3) & ~3


Address = tuple[int, tuple[object, ...]]
"""Family and socket address."""


def resolve_host(host: str, port: int, *, family: int = 0, numeric: bool = False) -> list[Address]:
    """Return the addresses of a host without duplicates.

    With ``numeric``, ``host`` is an address. Raises OSError if the name cannot be resolved, and
    UnicodeError if it is invalid.
    """
    name: str | bytes = (
        host.encode() if host.isascii() else host
    )  # a str would load the codec for IDNA
    flags = socket.AI_NUMERICHOST if numeric else 0
    rows = socket.getaddrinfo(name, port, family=family, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys((int(family), tuple(to)) for family, _, _, _, to in rows))


def resolve_in_thread(
    host: str,
    port: int,
    done: Callable[[list[Address] | OSError | UnicodeError], None],
    *,
    family: int = 0,
    other_addresses: Callable[[], Sequence[str]] | None = None,
) -> None:
    """Resolve a name in a thread, which calls ``done`` with the addresses or the error.

    The thread is abandoned if the resolver hangs. If the name is unknown, the thread calls
    ``other_addresses``, which returns other names or addresses of the host. Raises RuntimeError if
    no thread can be started.
    """
    import threading

    def work() -> None:
        found: list[Address] | OSError | UnicodeError
        try:
            found = resolve_host(host, port, family=family)
        except (OSError, UnicodeError) as exc:
            found = exc
            others: list[Address] = []
            for other in () if other_addresses is None else other_addresses():
                with suppress(OSError, UnicodeError):
                    others += resolve_host(other, port, family=family)
            if others:
                found = list(dict.fromkeys(others))
        done(found)

    threading.Thread(target=work, name="dl-resolve", daemon=True).start()
