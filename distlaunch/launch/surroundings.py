"""Read the facts that may name other nodes. Loaded only if an option or variable suggests them."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import quoted
from distlaunch.core.probe.files import read_bounded
from distlaunch.core.probe.network import probe_addresses
from distlaunch.planning.clusters import select
from distlaunch.planning.facts import Surroundings
from distlaunch.planning.hosts.this_host import Identity, names_in
from distlaunch.planning.node_source import option_of_host_list
from distlaunch.planning.train_options import TrainOptions

_HOSTS_FILE = "/etc/hosts"
_MOST_BYTES = 64 << 20
_SYSTEM_FILE_S = 5.0
HOST_FILE_S = 60.0
"""Time limit for a host file, which may be a pipe: ``--hostfile <(my-hosts)``."""


def read_surroundings(options: TrainOptions, environ: Mapping[str, str]) -> Surroundings:
    """Read the host file or the systems' files, this machine's names, and the output of --discover.

    Without a list of hosts by the user, the systems' files are read; one that cannot be read is
    None. Raises ConfigError for lists that exclude each other, an unreadable host file and a failed
    command.
    """
    texts: dict[str, str | None] = {}
    by_user = option_of_host_list(options)
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
    """Return this machine's names from the kernel and the text of /etc/hosts. A name server may not
    answer, so none is asked."""
    aliases = names_in(hosts_file, addresses)
    full = next((name for name in aliases if name.startswith(f"{hostname.lower()}.")), None)
    return Identity(hostname=hostname, fqdn=full, addresses=addresses, aliases=aliases)


def read_host_file(path: str, who: str, timeout_s: float = HOST_FILE_S) -> str:
    """Return the text of a host file.

    Raises ConfigError if the file cannot be read, is too large, or is a pipe that does not end in
    time.
    """
    try:
        data = read_bounded(path, most=_MOST_BYTES, timeout_s=timeout_s)
    except OSError as exc:
        raise ConfigError(
            f"{who} {quoted(path)}: {exc.strerror}",
            hint="use /dev/stdin for a pipe to distlaunch"
            if path == "-"
            else f"without {Opt.HOSTFILE}, and outside of a scheduler, the workers run on this "
            f"machine alone",
        ) from exc
    except ValueError as exc:
        raise ConfigError(f"{who} {quoted(path)}: the name of a file cannot have a NUL") from exc
    return data.decode(errors="surrogateescape")


def _system_file(path: str) -> str | None:
    """Return the text of a regular file; None if it cannot be read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
        return read_bounded(path, most=_MOST_BYTES, timeout_s=_SYSTEM_FILE_S).decode(
            errors="surrogateescape"
        )
    except (OSError, ValueError):
        return None
