"""The kernel's list of addresses: read as it is written, compared with what /proc says, and harmless where it is odd."""

from __future__ import annotations

import ipaddress
import itertools
import socket
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.core.probe import interfaces
from distlaunch.core.probe.interfaces import parse_addresses, probe_addresses

LOCAL, ADDRESS, LABEL = 2, 1, 3
"""IFA_* of linux/if_addr.h."""


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def message(family: int, *attributes: bytes, kind: int = 20) -> bytes:
    body = struct.pack("=BBBBI", family, 24, 0, 0, 2) + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(body), kind, 2, 1, 99) + body


def v4(kind: int, text: str) -> bytes:
    return attribute(kind, ipaddress.IPv4Address(text).packed)


def v6(kind: int, text: str) -> bytes:
    return attribute(kind, ipaddress.IPv6Address(text).packed)


DONE = struct.pack("=IHHII", 20, 3, 2, 1, 99) + struct.pack("=i", 0)


@pytest.mark.parametrize(
    ("datagram", "addresses", "done"),
    [
        (message(socket.AF_INET, v4(ADDRESS, "10.0.0.7"), v4(LOCAL, "10.0.0.7"), attribute(LABEL, b"eth0\0")), ["10.0.0.7"], False),
        (message(socket.AF_INET, v4(ADDRESS, "10.9.9.9"), v4(LOCAL, "10.0.0.8")), ["10.0.0.8"], False),
        (message(socket.AF_INET6, v6(ADDRESS, "fd00::7")), ["fd00::7"], False),
        (message(socket.AF_INET6, v6(ADDRESS, "fd00::7")) + message(socket.AF_INET, v4(LOCAL, "10.0.0.7")), ["fd00::7", "10.0.0.7"], False),
        (message(socket.AF_INET, v4(LOCAL, "10.0.0.7")) + DONE, ["10.0.0.7"], True),
        (message(socket.AF_INET, v4(LOCAL, "10.0.0.7"), kind=16), [], False),
        (message(17, v4(LOCAL, "10.0.0.7")), [], False),
        (message(socket.AF_INET6, v4(ADDRESS, "10.0.0.7")), [], False),
        (message(socket.AF_INET), [], False),
        (b"", [], False),
    ],
    ids=["v4", "our end of a link", "v6", "several", "the last", "another message", "another family", "wrong size", "none", "empty"],
)  # fmt: skip
def test_an_answer_is_read(datagram, addresses, done):
    assert parse_addresses(datagram) == (addresses, done)


@given(st.binary(max_size=200))
def test_any_bytes_end_somewhere(datagram):
    parse_addresses(datagram)
    parse_addresses(message(socket.AF_INET, datagram))


def test_the_addresses_of_this_machine_are_those_in_proc():
    found = probe_addresses()
    rows = [line.split()[0] for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    assert {str(ipaddress.IPv6Address(bytes.fromhex(row))) for row in rows} == {each for each in found if ":" in each}
    lines = Path("/proc/net/fib_trie").read_text().splitlines()
    before = itertools.pairwise(lines)
    local = {line.split()[-1] for line, following in before if following.strip() == "/32 host LOCAL"}
    assert local == {each for each in found if ":" not in each}


def test_a_kernel_that_does_not_answer_is_no_error(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(interfaces.socket, "socket", refuse)
    assert probe_addresses() == ()
