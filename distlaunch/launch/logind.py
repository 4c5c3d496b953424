"""Find out whether systemd's logind kills the job when the user logs out."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

from distlaunch.core.model.record import Record

_BUS = ("busctl", "--timeout=2")
_LOGIN = "org.freedesktop.login1"
_MANAGER = ("/org/freedesktop/login1", "org.freedesktop.login1.Manager")
_PROPERTIES = ("KillUserProcesses", "KillOnlyUsers", "KillExcludeUsers")
_COMMAND_S = 5.0
SCOPE = ("systemd-run", "--user", "--scope", "-q", "--collect")
"""Runs the command that follows in a scope of the user's own service manager, outside of the
session."""


class LogoutRule(Record):
    """What the end of the session does to a process that goes on in the background."""

    kills_session: bool
    """logind kills all processes of the session."""
    lingers: bool
    """The user's service manager, and the scopes in it, go on after the last logout."""
    has_scopes: bool
    """``systemd-run`` can start a scope of the user."""


HARMLESS = LogoutRule(kills_session=False, lingers=False, has_scopes=False)


def read_logout_rule(environ: Mapping[str, str]) -> LogoutRule:
    """Ask logind about this process, with ``busctl`` and ``loginctl``. Without logind, or a
    session, nothing is killed."""
    if shutil.which(_BUS[0], path=environ.get("PATH")) is None:
        return HARMLESS
    session = _output_of(*_BUS, "call", _LOGIN, *_MANAGER, "GetSessionByPID", "u", str(os.getpid()))
    if session is None or not session.startswith("o "):
        return HARMLESS
    found = _output_of(*_BUS, "get-property", _LOGIN, *_MANAGER, *_PROPERTIES)
    if found is None or not _kills(found.splitlines(), _user_name()):
        return HARMLESS
    linger = _output_of("loginctl", "show-user", str(os.getuid()), "--property=Linger")
    return LogoutRule(
        kills_session=True,
        lingers=linger is not None and linger.strip() == "Linger=yes",
        has_scopes=shutil.which(SCOPE[0], path=environ.get("PATH")) is not None,
    )


def _kills(lines: list[str], user: str) -> bool:
    """Return whether a user's processes are killed, by the answer of ``busctl get-property``."""
    if len(lines) != len(_PROPERTIES) or lines[0].strip() != "b true":
        return False
    only, excluded = (_parse_names(line) for line in lines[1:])
    return user not in excluded and (not only or user in only)


def _parse_names(line: str) -> list[str]:
    kind, _, names = line.partition(" ")
    return [word.strip('"') for word in names.split()[1:]] if kind == "as" else []


def _user_name() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return ""


def _output_of(*words: str) -> str | None:
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=_COMMAND_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout
