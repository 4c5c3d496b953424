"""What users are told of host keys that are not taken, whoever checks them; pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from distlaunch.core.model.text import printable, quoted
from distlaunch.transport.connect_errors import Trouble
from distlaunch.transport.ssh.knownhosts import SSH_PORT

_MOST_SCANNED = 600
_SCAN = re.compile(r"(ssh-keyscan (?:-p \d+ )?-H) (\S+) (>> \S+)")


def scan(host: str, port: int, file: str = "~/.ssh/known_hosts") -> str:
    """Write the command that adds a host's keys to known_hosts."""
    at = "" if port == SSH_PORT else f"-p {port} "
    return f"ssh-keyscan {at}-H {printable(host)} >> {printable(file)}"


def scan_all(hints: Sequence[str]) -> str | None:
    """Make one hint of several that differ in what ``scan`` has of hosts; None if they differ in more."""
    scans = [_SCAN.search(hint) for hint in hints]
    same = {(found[1], found[3]) for found in scans if found is not None}
    if None in scans or len(same) != 1:
        return None
    names = " ".join(found[2] for found in scans if found is not None)
    if len(names) > _MOST_SCANNED:
        return None
    [(command, target)] = same
    return _SCAN.sub(lambda _: f"{command} {names} {target}", hints[0])


def changed(what: str, name: str, command: str) -> Trouble:
    """Say that a host has another key than the one that is known; ``name`` is what known_hosts has of it."""
    return refused(
        f"ITS KEY HAS CHANGED: {what}. Someone may be posing as this host",
        hint=f"if it was installed anew: ssh-keygen -R {quoted(name)}, then {command}",
    )


def unknown(what: str, command: str) -> Trouble:
    """Say that a host's key is not known."""
    return refused(what, hint=f"to trust it: {command}; --ssh-host-keys accept-new takes the keys of all new hosts")


def refused(text: str, *, hint: str | None = None) -> Trouble:
    """Say that a host's key is not taken."""
    return Trouble("host key", text, hint=hint, passing=False)
