"""Layer resolve: hosts that the user names: ``--hosts``, ``--hostfile``, or what ``--discover``'s command prints; pure.

They are the most explicit source, so that nothing in the environment adds to them or takes away. Of the three, one.
"""

from __future__ import annotations

from collections.abc import Mapping

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.text import printable, quoted
from distlaunch.resolve.allocation import Allocation, Host, Origin
from distlaunch.resolve.hostfile import parse_hosts, read_hostfile, read_lines
from distlaunch.resolve.hostlist import fold_counts, fold_hosts


def find(
    *,
    hosts: str | None = None,
    hostfile: str | None = None,
    discover: str | None = None,
    texts: Mapping[str, str | None] | None = None,
    discovered: str | None = None,
) -> Allocation | None:
    """Return what the one of the three options says that was given; None if none was.

    ``texts`` has the content of ``hostfile`` by its path (None or no entry if it could not be read); ``discovered`` is
    what the command ``discover`` printed. Raises ConfigError for two options at once, for a file that is missing or
    names no host, and for what is no list of hosts.
    """
    given = [
        f"{name} {quoted(value)}"
        for name, value in (("--hosts", hosts), ("--hostfile", hostfile), ("--discover", discover))
        if value is not None
    ]
    if len(given) > 1:
        raise ConfigError(
            f"{' and '.join(given)} both name the hosts",
            hint="give one of them; --include and --exclude choose among its hosts",
        )
    if hosts is not None:
        return _allocation("flags", parse_hosts(hosts), "--hosts")
    if hostfile is not None:
        text = (texts or {}).get(hostfile)
        if text is None:
            raise ConfigError(
                f"--hostfile {quoted(hostfile)}: there is no such file, or it cannot be read",
                hint="without --hostfile, the workers run on this machine alone",
            )
        return _allocation("hostfile", read_hostfile(text, hostfile), hostfile)
    if discover is not None:
        found = discovered_hosts(discovered or "", discover)
        if not found:
            raise ConfigError(
                f"--discover {quoted(discover)}: the command names no host",
                hint="it has to print a line for each host: HOST or HOST:SLOTS",
            )
        return _allocation("discover", found, f"--discover {discover}")
    return None


def discovered_hosts(output: str, command: str) -> tuple[Host, ...]:
    """Read what ``--discover``'s command printed: lines ``host[:slots]``, as Horovod has them, maybe none right now."""
    return read_lines(output, f"--discover {quoted(command)}, line ")


def _allocation(name: str, hosts: tuple[Host, ...], origin: str) -> Allocation:
    said = printable(origin)
    origins = [Origin(value="hosts", shown=fold_hosts(host.name for host in hosts), source=said)]
    if any(host.slots is not None for host in hosts):
        origins.append(Origin(value="slots", shown=fold_counts(host.slots for host in hosts), source=said))
    return Allocation(source=name, hosts=hosts, origins=tuple(origins))
