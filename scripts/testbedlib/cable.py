"""How a host of a test bed is wired to the switch: as it should be, cut off, kept from some others,
or slow and lossy.

A file of the host's says what is wanted, so that whoever changes one thing keeps the others.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

from testbedlib import hosts as bed
from testbedlib import layout
from testbedlib.client import Hosts, until
from testbedlib.layout import Link

_RELAY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "relay.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """The faults of a host's cables."""

    cut: bool = False
    isolated: bool = False
    delay_ms: float = 0.0
    """Each way."""
    loss_percent: float = 0.0

    @property
    def needs_relay(self) -> bool:
        """Whether frames must go through a program: this kernel may have no netem."""
        return bool(self.delay_ms or self.loss_percent)

    def same_relay(self, other: Cable) -> bool:
        """Whether the relay can stay as it is."""
        return (self.delay_ms, self.loss_percent) == (other.delay_ms, other.loss_percent)


def change(hosts: Hosts, host: str, **settings: Any) -> None:
    """Change what is wrong with a host's cables."""
    path = f"{hosts.directory}/hosts/{host}/cable.json"
    before = Cable()
    if os.path.exists(path):
        with open(path, encoding="ascii") as file:
            before = Cable(**json.load(file))
    after = replace(before, **settings)
    for link in hosts.layout[host].links:
        _wire(hosts, host, link, before, after)
    with open(f"{path}.new", "w", encoding="ascii") as file:
        json.dump(asdict(after), file)
    os.rename(f"{path}.new", path)


def _wire(hosts: Hosts, host: str, link: Link, before: Cable, after: Cable) -> None:
    """Plug a port in: into the network's bridge, or into a bridge at the near end of the relay."""
    network = layout.bridge(link.network)
    between, near, far = (f"{link.port}{letter}" for letter in "rnf")
    commands = [f"link set {link.port} nomaster"]
    if not before.same_relay(after):
        if before.needs_relay:
            _stop_relay(hosts, host, link, near)
            commands.append(f"link delete {between}")
        if after.needs_relay:
            numbers = (str(after.delay_ms / 1000), str(after.loss_percent / 100))
            hosts.run(
                bed.SWITCH,
                sys.executable,
                _RELAY,
                near,
                far,
                *numbers,
                _pid_file(hosts, host, link),
            )
            commands += [
                f"link add name {between} type bridge mcast_snooping 0",
                f"link set {between} up",
                f"link set {near} master {between} up",
                f"link set {far} master {network} up",
            ]
    if not after.cut:
        commands.append(f"link set {link.port} master {between if after.needs_relay else network}")
    _ip(hosts, commands)
    plugged = far if after.needs_relay else None if after.cut else link.port
    if plugged is not None:
        isolated = "on" if after.isolated else "off"
        hosts.run(bed.SWITCH, "bridge", "link", "set", "dev", plugged, "isolated", isolated)


def _ip(hosts: Hosts, commands: list[str]) -> None:
    hosts.run(bed.SWITCH, "ip", "-batch", "-", stdin="\n".join(commands) + "\n")


def _pid_file(hosts: Hosts, host: str, link: Link) -> str:
    return f"{hosts.directory}/hosts/{host}/relay-{link.port}.pid"


def _stop_relay(hosts: Hosts, host: str, link: Link, device: str) -> None:
    with open(_pid_file(hosts, host, link), encoding="ascii") as file:
        hosts.run(bed.SWITCH, "kill", "-KILL", file.read())
    until(
        lambda: hosts.run(bed.SWITCH, "ip", "link", "show", device, check=False).returncode,
        "the end of the relay's devices",
    )
