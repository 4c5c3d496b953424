"""The hosts of a test bed: names, networks, addresses, and the files that describe them."""

from __future__ import annotations

import glob
import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from testbedlib.sandbox import TestbedError

HEAD = "head"
"""The host where the launcher runs."""
MOST_HOSTS = 250
MOST_NETWORKS = 4
DOCKER = "docker0"
_APART_S = 100_000
_SSHD = """\
Port 22
HostKey {directory}/hosts/{name}/ssh_host_ed25519_key
PidFile {directory}/hosts/{name}/sshd.pid
AuthorizedKeysFile {directory}/ssh/id_ed25519.pub
AcceptEnv LANG LC_*
LogLevel INFO
MaxStartups 1000
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PermitUserEnvironment no
PrintLastLog no
PrintMotd no
StrictModes no
Subsystem sftp internal-sftp
UseDNS no
UsePAM no
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Settings of a test bed of hosts."""

    count: int = 4
    names: tuple[str, ...] = ()
    """Of the hosts beside ``head``; n1, n2, … where none are given."""
    networks: int = 1
    ipv6_only: bool = False
    jump: bool = False
    """The first host stands between the head's network and that of all others."""
    own_name_is_loopback: tuple[str, ...] = ()
    """Hosts whose own name is 127.0.1.1 in their /etc/hosts, as Debian's installer writes it."""
    no_names: bool = False
    """No host knows any name but its own; ssh_config has the addresses."""
    docker: bool = False
    """Every host has the interface docker0 with the same address."""
    own_tmp: bool = False
    clocks: tuple[str, ...] = ()
    """``n1=2.5``: what runs by SSH on n1 sees a time of day that is 2.5 s ahead."""
    clocks_apart: bool = False
    """Every host counts its monotonic time from another start, as real ones do."""
    disk_mb: int = 16

    def __post_init__(self) -> None:
        """Refuse what cannot be brought up."""
        if not 1 <= self.count <= MOST_HOSTS:
            raise TestbedError(f"{self.count} hosts: 1 to {MOST_HOSTS} are possible")
        if not 1 <= self.networks <= MOST_NETWORKS:
            raise TestbedError(f"{self.networks} networks: 1 to {MOST_NETWORKS} are possible")
        names = self.all_names()
        if len(names) != self.count + 1 or len(set(names)) != len(names):
            raise TestbedError(
                f"{self.count} hosts need as many different names, none of them {HEAD}"
            )
        for name in names:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]{0,62}", name):
                raise TestbedError(f"{name!r} cannot be the name of a host")
        if unknown := set(self.own_name_is_loopback) - set(names):
            raise TestbedError(f"there is no host {min(unknown)}")
        if unknown := set(self.ahead_s()) - set(names):
            raise TestbedError(f"there is no host {min(unknown)}")

    def ahead_s(self) -> dict[str, float]:
        """Return the seconds by which hosts' time of day is ahead."""
        try:
            return {
                name: float(seconds)
                for name, _, seconds in (item.partition("=") for item in self.clocks)
            }
        except ValueError:
            raise TestbedError(
                f"{','.join(self.clocks)}: clocks are written NAME=SECONDS"
            ) from None

    def all_names(self) -> list[str]:
        """Name the head, then the others."""
        return [HEAD, *(self.names or (f"n{number}" for number in range(1, self.count + 1)))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A host's way into one network."""

    network: int
    interface: str
    """On the host."""
    port: str
    """On the switch."""
    ipv4: str | None
    ipv6: str

    @property
    def address(self) -> str:
        """The address by which others know the host in this network."""
        return self.ipv4 or self.ipv6


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host: its name, and its links in the order of its interfaces."""

    name: str
    links: tuple[Link, ...]
    ahead_s: float
    """By how much its time of day is ahead."""
    monotonic_s: int
    """By how much its monotonic clock is ahead of the machine's."""

    def clock_variables(self) -> dict[str, str]:
        """Return the environment that makes programs believe this host's time of day."""
        if not self.ahead_s:
            return {}
        return {
            "LD_PRELOAD": _library(),
            "FAKETIME": f"{self.ahead_s:+}",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }


def _library() -> str:
    found = glob.glob("/usr/lib/*/faketime/libfaketime.so.1")
    if not found:
        raise TestbedError("libfaketime is not installed; Debian: apt-get install libfaketime")
    return found[0]


def hosts(wanted: Wanted) -> list[Host]:
    """Return each host its networks and addresses: 10.10.1.7 and fd10::1:7 is n7 in the first
    network."""
    found = []
    for number, name in enumerate(wanted.all_names()):
        links = []
        for position, network in enumerate(_networks(wanted, number)):
            tens, tail = 10 * (network + 1), (1, number) if number else (0, 1)
            links.append(
                Link(
                    network=network,
                    interface=f"eth{position}",
                    port=f"port{number}-{network}",
                    ipv4=None if wanted.ipv6_only else f"10.{tens}.{tail[0]}.{tail[1]}",
                    ipv6=str(ipaddress.ip_address(f"fd{tens}::{tail[0]}:{tail[1]}")),
                )
            )
        found.append(
            Host(
                name=name,
                links=tuple(links),
                ahead_s=wanted.ahead_s().get(name, 0.0),
                monotonic_s=_APART_S * number if wanted.clocks_apart else 0,
            )
        )
    return found


def _networks(wanted: Wanted, number: int) -> Sequence[int]:
    if not wanted.jump:
        return range(wanted.networks)
    inner = range(1, 1 + wanted.networks)
    return (0,) if number == 0 else (0, *inner) if number == 1 else inner


def bridge(network: int) -> str:
    """Name the switch of a network."""
    return f"net{network}"


def network_count(all_hosts: Sequence[Host]) -> int:
    """Count the networks of a layout."""
    return 1 + max(link.network for host in all_hosts for link in host.links)


def to_json(all_hosts: Sequence[Host]) -> str:
    """Write a layout down, for ``from_json``."""
    return json.dumps([asdict(host) for host in all_hosts])


def from_json(text: str) -> list[Host]:
    """Read what ``to_json`` wrote."""
    return [
        Host(**{**item, "links": tuple(Link(**link) for link in item["links"])})
        for item in json.loads(text)
    ]


# --- files -----------------------------------------------------------------------------------------------------------


def _known_as(seen_by: Host, other: Host) -> dict[str, str]:
    """Return the names and addresses by which a host knows another: the plain name is in the first
    network they share."""
    shared = {link.network for link in seen_by.links}
    found: dict[str, str] = {}
    for link in other.links:
        if link.network in shared:
            found.setdefault(other.name, link.address)
            found[f"{other.name}-{bridge(link.network)}"] = link.address
    return found


def etc_hosts(host: Host, all_hosts: Sequence[Host], wanted: Wanted) -> str:
    """Write a host's /etc/hosts."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    for other in all_hosts:
        if other.name == host.name and other.name in wanted.own_name_is_loopback:
            lines.append(f"127.0.1.1 {other.name}")
        elif other.name == host.name or not wanted.no_names:
            lines += [f"{address} {name}" for name, address in _known_as(host, other).items()]
    return "\n".join(lines) + "\n"


def sshd_config(host: Host, directory: str) -> str:
    """Write the configuration of a host's sshd."""
    variables = " ".join(f"{name}={value}" for name, value in host.clock_variables().items())
    return _SSHD.format(directory=directory, name=host.name) + (
        f"SetEnv {variables}\n" if variables else ""
    )


def ssh_config(all_hosts: Sequence[Host], wanted: Wanted, directory: str) -> str:
    """Write the configuration of clients on the head."""
    head = all_hosts[0]
    lines = []
    for host in all_hosts:
        known = _known_as(head, host)
        if not known:
            lines += [f"Host {host.name}", f"  ProxyJump {all_hosts[1].name}"]
        elif wanted.no_names:
            lines += [f"Host {host.name}", f"  HostName {known[host.name]}"]
    lines += [
        "Host *",
        f"  IdentityFile {directory}/ssh/id_ed25519",
        "  IdentitiesOnly yes",
        f"  UserKnownHostsFile {directory}/ssh/known_hosts",
        "  GlobalKnownHostsFile /dev/null",
        "  StrictHostKeyChecking yes",
        "  UpdateHostKeys no",
    ]
    return "\n".join(lines) + "\n"


def known_hosts(all_hosts: Sequence[Host], keys: Mapping[str, str]) -> str:
    """Write the host keys, given the public one of each host as ssh-keygen wrote it."""
    lines = []
    for host in all_hosts:
        addresses = [
            address for link in host.links for address in (link.ipv4, link.ipv6) if address
        ]
        others = [f"{host.name}-{bridge(link.network)}" for link in host.links]
        kind, key = keys[host.name].split()[:2]
        lines.append(f"{','.join([host.name, *others, *addresses])} {kind} {key}")
    return "\n".join(lines) + "\n"
