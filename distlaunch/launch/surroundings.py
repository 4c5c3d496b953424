"""Reads what may name other nodes, once; loaded only where something hints at any."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.text import quoted
from distlaunch.core.probe.files import read_bounded
from distlaunch.core.probe.network import probe_addresses
from distlaunch.planning.clusters import select
from distlaunch.planning.facts import Surroundings
from distlaunch.planning.hosts.this_host import Identity, names_in
from distlaunch.planning.node_source import check_lists
from distlaunch.planning.train_options import TrainOptions

_HOSTS_FILE = "/etc/hosts"
_MOST_BYTES = 64 << 20
_SYSTEM_FILE_S = 5.0
PATIENCE_S = 60.0
"""How long a host file may take to end, which may also be a pipe: ``--hostfile <(my-hosts)``."""


def read_surroundings(options: TrainOptions, environ: Mapping[str, str]) -> Surroundings:
    """Read host file, the systems' own files, this machine's names, and what --discover prints.

    Raises ConfigError for lists that exclude each other, and for a host file or a command that
    fails; a system's file that cannot be read is None.
    """
    texts: dict[str, str | None] = {}
    by_user = check_lists(options)
    if options.hostfile is not None:
        texts[options.hostfile] = read_host_file(options.hostfile, by_user or "")
    if by_user is None:
        paths = select.files(environ, wanted=options.source)
        texts.update((path, _system_file(path)) for path in paths)
    discovered = None
    if options.discover is not None:
        from distlaunch.launch.discovery import run_discover

        discovered = run_discover(options.discover, environ, who=by_user or "")
    return Surroundings(
        texts=texts,
        discovered=discovered,
        identity=own_identity(
            socket.gethostname(), _system_file(_HOSTS_FILE) or "", probe_addresses()
        ),
    )


def own_identity(hostname: str, hosts_file: str, addresses: tuple[str, ...]) -> Identity:
    """Say what this machine is called by the kernel and by /etc/hosts; a name server, which may
    hang, is not asked."""
    aliases = names_in(hosts_file, addresses)
    full = next((name for name in aliases if name.startswith(f"{hostname.lower()}.")), None)
    return Identity(hostname=hostname, fqdn=full, addresses=addresses, aliases=aliases)


def read_host_file(path: str, who: str) -> str:
    """Read it, in bounds, as it may be a pipe; ``who`` names it. Raises ConfigError."""
    try:
        data = read_bounded(path, most=_MOST_BYTES, timeout_s=PATIENCE_S)
    except OSError as exc:
        raise ConfigError(
            f"{who} {quoted(path)}: {exc.strerror}",
            hint="/dev/stdin reads what is piped to us"
            if path == "-"
            else "without --hostfile, and outside of a scheduler, the workers run on this machine "
            "alone",
        ) from exc
    except ValueError as exc:
        raise ConfigError(f"{who} {quoted(path)}: a name of a file has no NUL") from exc
    return data.decode(errors="surrogateescape")


def _system_file(path: str) -> str | None:
    """Read a file that a variable names, if it is a plain one and can be read whole."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
        return read_bounded(path, most=_MOST_BYTES, timeout_s=_SYSTEM_FILE_S).decode(
            errors="surrogateescape"
        )
    except (OSError, ValueError):
        return None
