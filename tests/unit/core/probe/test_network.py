"""Parsing of the kernel's addresses, compared with /proc, and with invalid input."""

from __future__ import annotations

import ipaddress
import itertools
import socket
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.core.probe import network
from distlaunch.core.probe.network import (
    parse_addresses,
    parse_links,
    parse_networks,
    probe_addresses,
    probe_interfaces,
)

LOCAL, ADDRESS, LABEL = 2, 1, 3
"""IFA_* of linux/if_addr.h."""


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def message(family: int, *attributes: bytes, kind: int = 20, flags: int = 0) -> bytes:
    body = struct.pack("=BBBBI", family, 24, flags, 0, 2) + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(body), kind, 2, 1, 99) + body


def v4(kind: int, text: str) -> bytes:
    return attribute(kind, ipaddress.IPv4Address(text).packed)


def v6(kind: int, text: str) -> bytes:
    return attribute(kind, ipaddress.IPv6Address(text).packed)


def link(index: int, name: str, flags: int) -> bytes:
    body = struct.pack("=BxHiII", 0, 1, index, flags, 0) + attribute(3, name.encode() + b"\0")
    return struct.pack("=IHHII", 16 + len(body), 16, 2, 1, 99) + body


UP, LOOPBACK, RUNNING = 0x1, 0x8, 0x40
"""IFF_* of linux/if.h."""
DONE = struct.pack("=IHHII", 20, 3, 2, 1, 99) + struct.pack("=i", 0)


@pytest.mark.parametrize(
    ("datagram", "addresses", "done"),
    [
        (
            message(
                socket.AF_INET,
                v4(ADDRESS, "10.0.0.7"),
                v4(LOCAL, "10.0.0.7"),
                attribute(LABEL, b"eth0\0"),
            ),
            ["10.0.0.7"],
            False,
        ),
        (
            message(socket.AF_INET, v4(ADDRESS, "10.9.9.9"), v4(LOCAL, "10.0.0.8")),
            ["10.0.0.8"],
            False,
        ),
        (message(socket.AF_INET6, v6(ADDRESS, "fd00::7")), ["fd00::7"], False),
        (
            message(socket.AF_INET6, v6(ADDRESS, "fd00::7"))
            + message(socket.AF_INET, v4(LOCAL, "10.0.0.7")),
            ["fd00::7", "10.0.0.7"],
            False,
        ),
        (message(socket.AF_INET, v4(LOCAL, "10.0.0.7")) + DONE, ["10.0.0.7"], True),
        (message(socket.AF_INET, v4(LOCAL, "10.0.0.7"), kind=16), [], False),
        (message(17, v4(LOCAL, "10.0.0.7")), [], False),
        (message(socket.AF_INET6, v4(ADDRESS, "10.0.0.7")), [], False),
        (message(socket.AF_INET), [], False),
        (b"", [], False),
    ],
    ids=[
        "v4",
        "our end of a link",
        "v6",
        "several",
        "the last",
        "another message",
        "another family",
        "wrong size",
        "none",
        "empty",
    ],
)
def test_addresses_are_parsed(datagram, addresses, done):
    assert parse_addresses(datagram) == (addresses, done)


@pytest.mark.parametrize(
    ("datagram", "networks"),
    [
        (
            message(socket.AF_INET, v4(ADDRESS, "10.0.0.7"), v4(LOCAL, "10.0.0.7")),
            [(2, "10.0.0.7", 24)],
        ),
        (message(socket.AF_INET6, v6(ADDRESS, "fd00::7"), flags=0x80), [(2, "fd00::7", 24)]),
        (message(socket.AF_INET, v4(LOCAL, "127.0.0.1")), []),
        (message(socket.AF_INET6, v6(ADDRESS, "::1")), []),
        (message(socket.AF_INET6, v6(ADDRESS, "fe80::1")), []),
        (message(socket.AF_INET6, v6(ADDRESS, "febf::1")), []),
        (message(socket.AF_INET6, v6(ADDRESS, "fd00::7"), flags=0x08), []),
        (message(socket.AF_INET6, v6(ADDRESS, "fd00::7"), flags=0x40), []),
    ],
    ids=[
        "v4",
        "v6",
        "loopback",
        "loopback v6",
        "link-local",
        "link-local end",
        "a duplicate",
        "tentative",
    ],
)
def test_addresses_that_others_cannot_use_are_omitted(datagram, networks):
    assert parse_networks(datagram + DONE) == (networks, True)


def test_interfaces_without_a_carrier_are_omitted():
    answer = (
        link(1, "lo", UP | LOOPBACK | RUNNING)
        + link(2, "eth0", UP | RUNNING)
        + link(3, "docker0", UP)
        + link(4, "down", RUNNING)
    )
    assert parse_links(answer) == ({1: "lo", 2: "eth0"}, False)
    assert parse_links(DONE) == ({}, True)


def test_the_interfaces_of_this_machine_are_those_that_python_knows():
    names = {name for _, name in socket.if_nameindex()}
    found = probe_interfaces()
    assert {name for name, _, _ in found} <= names
    assert {address for _, address, _ in found} <= set(probe_addresses())
    assert all(
        0 < bits <= ipaddress.ip_address(address).max_prefixlen for _, address, bits in found
    )


@given(st.binary(max_size=200))
def test_parsing_ends_for_any_bytes(datagram):
    parse_addresses(datagram)
    parse_links(datagram)
    parse_networks(datagram)
    parse_links(struct.pack("=IHHII", 16 + len(datagram), 16, 2, 1, 99) + datagram)
    parse_addresses(message(socket.AF_INET, datagram))


def test_the_addresses_of_this_machine_are_those_in_proc():
    found = probe_addresses()
    rows = [line.split()[0] for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    assert {str(ipaddress.IPv6Address(bytes.fromhex(row))) for row in rows} == {
        each for each in found if ":" in each
    }
    lines = Path("/proc/net/fib_trie").read_text().splitlines()
    before = itertools.pairwise(lines)
    local = {
        line.split()[-1] for line, following in before if following.strip() == "/32 host LOCAL"
    }
    assert local == {each for each in found if ":" not in each}


def test_a_kernel_that_does_not_answer_is_no_error(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(network.socket, "socket", refuse)
    assert probe_addresses() == ()
    assert probe_interfaces() == ()
