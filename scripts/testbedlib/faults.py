"""Faults of a host of a test bed: ``cut(hosts, "n2")``. ``mend`` undoes all of them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence

from testbedlib import cable
from testbedlib import hosts as bed
from testbedlib.client import Hosts, Process, until
from testbedlib.host import SSHD
from testbedlib.sandbox import TestbedError

_FILLER = ".filler"
_LEAST_BURST_BYTES = 16384


# --- the network -----------------------------------------------------------------------------------------------------


def cut(hosts: Hosts, host: str, *, on: bool = True) -> None:
    """Make the switch drop all packets from and to a host. The carrier stays up, so no program
    notices."""
    cable.change(hosts, host, cut=on)


def link(hosts: Hosts, host: str, *, up: bool) -> None:
    """Pull the cable at the switch, or put it back: the host sees its carrier go and come."""
    for item in hosts.layout[host].links:
        hosts.run(bed.SWITCH, "ip", "link", "set", item.port, "up" if up else "down")


def isolate(hosts: Hosts, host: str, *, on: bool = True) -> None:
    """Keep a host from all others that are isolated, too; the rest it still reaches: a firewall
    between nodes."""
    cable.change(hosts, host, isolated=on)


def delay(hosts: Hosts, host: str, delay_ms: float, loss_percent: float = 0.0) -> None:
    """Delay, each way, all that a host sends and gets, and lose a part of it; nought and nought end
    that."""
    cable.change(hosts, host, delay_ms=delay_ms, loss_percent=loss_percent)


def rate(hosts: Hosts, host: str, mbit_per_s: float | None) -> None:
    """Limit what a host sends and gets, each; None is without limit."""
    for item in hosts.layout[host].links:
        for where, device in ((bed.SWITCH, item.port), (host, item.interface)):
            if mbit_per_s is None:
                hosts.run(where, "tc", "qdisc", "delete", "dev", device, "root", check=False)
                continue
            burst = max(_LEAST_BURST_BYTES, int(mbit_per_s * 1e6 / 8 / 100))
            hosts.run(
                where,
                f"tc qdisc replace dev {device} root tbf rate {mbit_per_s}mbit burst {burst}b "
                "latency 100ms",
            )


# --- sshd ------------------------------------------------------------------------------------------------------------


def _listeners(hosts: Hosts, host: str) -> list[Process]:
    return [process for process in hosts.sessions(host) if "[listener]" in process.argv[0]]


def stop_sshd(hosts: Hosts, host: str) -> None:
    """Kill a host's sshd that listens; connections that there are stay."""
    _kill(_listeners(hosts, host))
    until(lambda: not _listeners(hosts, host), f"the end of sshd on {host}")


def kill_sessions(hosts: Hosts, host: str) -> None:
    """Kill the sshd processes of all connections; new ones are possible at once."""
    _kill([process for process in hosts.sessions(host) if "[listener]" not in process.argv[0]])


def kill_sshd(hosts: Hosts, host: str) -> None:
    """Kill all of a host's sshd: no connection is left, and none can be made."""
    stop_sshd(hosts, host)
    _kill(hosts.sessions(host))
    until(lambda: not hosts.sessions(host), f"the end of all sshd on {host}")


def start_sshd(hosts: Hosts, host: str) -> None:
    """Start a host's sshd if none listens."""
    if _listeners(hosts, host):
        return
    own = f"{hosts.directory}/hosts/{host}"
    if os.path.exists(f"{own}/sshd.pid"):
        os.unlink(f"{own}/sshd.pid")
    hosts.run(host, SSHD, "-f", f"{own}/sshd_config", "-E", f"{own}/sshd.log")
    until(lambda: os.path.exists(f"{own}/sshd.pid"), f"sshd on {host}")


def _kill(processes: Sequence[Process]) -> None:
    for process in processes:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


# --- all processes ---------------------------------------------------------------------------------------------------


def pause(hosts: Hosts, host: str) -> None:
    """Stop all processes of a host, as a machine that swaps or a hypervisor that is busy; its
    network goes on."""
    hosts.run(host, "kill -STOP -1", check=False)


def resume(hosts: Hosts, host: str) -> None:
    """Undo ``pause``."""
    hosts.run(host, "kill -CONT -1", check=False)


def kill_all(hosts: Hosts, host: str) -> None:
    """Kill all processes of a host, sshd too; the kernel closes their connections."""
    hosts.run(host, "kill -KILL -1", check=False)
    until(lambda: not hosts.everything(host), f"the end of all processes of {host}")


def power_off(hosts: Hosts, host: str) -> None:
    """Cut a host off, then kill all its processes."""
    cut(hosts, host)
    kill_all(hosts, host)


def power_on(hosts: Hosts, host: str) -> None:
    """Bring a host back after ``power_off``, with a fresh sshd."""
    cut(hosts, host, on=False)
    start_sshd(hosts, host)


# --- the disk --------------------------------------------------------------------------------------------------------


def fill(hosts: Hosts, host: str) -> None:
    """Fill a host's own disk, ``DIR/local``, to the last byte."""
    hosts.run(host, f"exec 2>&-; cat /dev/zero >{hosts.local}/{_FILLER}; true")


def unfill(hosts: Hosts, host: str) -> None:
    """Undo ``fill``."""
    hosts.run(host, f"rm -f {hosts.local}/{_FILLER}")


# --- by words --------------------------------------------------------------------------------------------------------


def mend(hosts: Hosts, host: str) -> None:
    """Undo every fault of a host."""
    resume(hosts, host)
    rate(hosts, host, None)
    link(hosts, host, up=True)
    cable.change(hosts, host, cut=False, isolated=False, delay_ms=0.0, loss_percent=0.0)
    unfill(hosts, host)
    start_sshd(hosts, host)


_MATCH: dict[str, Callable[[Hosts, str], None]] = {
    "cut": cut,
    "uncut": lambda hosts, host: cut(hosts, host, on=False),
    "link down": lambda hosts, host: link(hosts, host, up=False),
    "link up": lambda hosts, host: link(hosts, host, up=True),
    "isolate": isolate,
    "isolate off": lambda hosts, host: isolate(hosts, host, on=False),
    "rate off": lambda hosts, host: rate(hosts, host, None),
    "delay off": lambda hosts, host: delay(hosts, host, 0),
    "sshd stop": stop_sshd,
    "sshd kill": kill_sshd,
    "sshd start": start_sshd,
    "sessions kill": kill_sessions,
    "pause": pause,
    "resume": resume,
    "kill": kill_all,
    "off": power_off,
    "on": power_on,
    "fill": fill,
    "unfill": unfill,
    "mend": mend,
}
WORDS = [*_MATCH, "rate N mbit", "delay N ms [loss N %]"]
"""What ``apply`` understands; a unit may stand next to its number or be left out."""


def apply(hosts: Hosts, host: str, words: Sequence[str]) -> None:
    """Do what a command line says: ``delay 300ms loss 1%``. Raises TestbedError."""
    if host not in hosts.layout:
        raise TestbedError(f"there is no host {host}; there are: {', '.join(hosts.layout)}")
    message = " ".join(words)
    number = r"([0-9]+(?:\.[0-9]+)?)"
    if (action := _MATCH.get(message)) is not None:
        action(hosts, host)
    elif found := re.fullmatch(rf"rate {number} ?(?:mbit)?", message):
        rate(hosts, host, float(found[1]))
    elif found := re.fullmatch(rf"delay {number} ?(?:ms)?(?: loss {number} ?%?)?", message):
        delay(hosts, host, float(found[1]), float(found[2] or 0))
    else:
        raise TestbedError(f"no fault is called {message!r}; there are: {', '.join(WORDS)}")
