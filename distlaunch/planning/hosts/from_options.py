"""Read the hosts of ``--hosts``, ``--hostfile`` or ``--discover``. No I/O.

Only one of them may be set. It comes before all systems in the environment.
"""

from __future__ import annotations

from collections.abc import Mapping

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.host_list import fold_counts, fold_hosts
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import printable, quoted
from distlaunch.planning.allocation import Allocation, Host, Origin
from distlaunch.planning.hosts.hostfile import parse_hosts, read_hostfile, read_lines


def find(
    *,
    hosts: str | None = None,
    hostfile: str | None = None,
    discover: str | None = None,
    texts: Mapping[str, str | None] | None = None,
    discovered: str | None = None,
    who: str = "",
) -> Allocation | None:
    """Return the hosts of the option that is set, if any.

    ``texts`` has the content of ``hostfile`` by its path. ``discovered`` is the output of the
    command ``discover``. ``who`` is the option or variable for messages. Raises ConfigError for a
    file or command that names no host, and for invalid lists.
    """
    if hosts is not None:
        name = who or str(Opt.HOSTS)
        return _allocation_of_hosts("flags", parse_hosts(hosts, name), name)
    if hostfile is not None:
        return _allocation_of_hosts(
            "hostfile", read_hostfile((texts or {}).get(hostfile) or "", hostfile), hostfile
        )
    if discover is not None:
        name = who or str(Opt.DISCOVER)
        found = discovered_hosts(discovered or "", discover, name)
        if not found:
            raise ConfigError(
                f"{command_of(discover, name)}: the command names no host",
                hint="the command must print a line for each host: HOST or HOST:SLOTS",
            )
        return _allocation_of_hosts("discover", found, name)
    return None


def command_of(command: str, who: str) -> str:
    """Return the text that names the command in errors.

    The text of a command in a variable is left out, since it may contain secrets.
    """
    return f"{who} {quoted(command)}" if who.startswith("-") else who


def discovered_hosts(output: str, command: str, who: str | None = None) -> tuple[Host, ...]:
    """Return the hosts that the --discover command printed, possibly none.

    The command prints lines ``host[:slots]``, as for Horovod. ``who`` is the option or variable,
    for errors.
    """
    return read_lines(output, f"{command_of(command, who or str(Opt.DISCOVER))}, line ")


def _allocation_of_hosts(name: str, hosts: tuple[Host, ...], origin: str) -> Allocation:
    said = printable(origin)
    origins = [Origin(value="hosts", shown=fold_hosts(host.name for host in hosts), source=said)]
    if any(host.slots is not None for host in hosts):
        origins.append(
            Origin(value="slots", shown=fold_counts(host.slots for host in hosts), source=said)
        )
    return Allocation(source=name, hosts=hosts, by_user=True, origins=tuple(origins))
