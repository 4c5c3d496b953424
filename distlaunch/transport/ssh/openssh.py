"""Reach nodes by the user's own ssh program (``--ssh-command ssh``).

It needs 110 ms of CPU per node, and supports certificates, GSSAPI, host-based logins and security
keys, which paramiko lacks.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import printable, quoted
from distlaunch.planning.train_options import HostKeys
from distlaunch.transport.bootstrap import remote_command, start_agent
from distlaunch.transport.child_process import KillSwitch, ProcessConnection
from distlaunch.transport.connect_errors import SSH_PORT, ConnectStepError, KeyScan, Step
from distlaunch.transport.connection import ConnectError, Connection, Target
from distlaunch.transport.ssh.config import SshOptions
from distlaunch.transport.ssh.host_keys import changed, unknown

_CONNECT_S = 15
_OWN_FAILURE = 255
"""Exit code of ssh for its own errors. Others are those of the command."""
_LONGEST = 300
_CHECKS = {"strict": "yes", "accept-new": "accept-new", "off": "no"}

# Messages of ssh, the step that failed, and whether it may work in a moment. The first match
# counts.
_MESSAGES: tuple[tuple[str, Step, bool], ...] = (
    (r"Could not resolve hostname", "resolve", False),
    (r"Temporary failure in name resolution", "resolve", True),
    (r"IDENTIFICATION HAS CHANGED", "host key", False),
    (r"host key is known|Host key verification failed|REVOKED HOST KEY", "host key", False),
    (
        r"Permission denied \(|Too many authentication failures|Disconnected from authenticating",
        "login",
        False,
    ),
    (r"Unable to negotiate|no matching", "connect", False),
    (
        r"Bad (configuration|owner)|[Uu]nsupported option|terminating, \d+ bad configuration",
        "connect",
        False,
    ),
)
_NOISE = re.compile(r"^(Warning: Permanently added|@+$|debug\d:)")
_NAMED = re.compile(r"(?:host key is known for|[Hh]ost key for) (\S+)")
_OFFENDING = re.compile(r"Offending .*key.* in (.+:\d+)")


class SshCommandConnector:
    """Opens connections by a command with the options of OpenSSH's ``ssh``."""

    def __init__(
        self,
        command: str,
        *,
        options: SshOptions,
        host_keys: HostKeys | None,
        code: bytes,
        pythons: Sequence[str],
        environ: Mapping[str, str],
        kill_switch: KillSwitch | None = None,
    ) -> None:
        """Raise ConfigError if the command cannot be split into words. Programs are attached to the
        kill switch."""
        try:
            self._words = shlex.split(command)
        except ValueError as exc:
            raise ConfigError(f"{Opt.SSH_COMMAND(quoted(command))}: {exc}") from exc
        if not self._words:
            raise ConfigError(f"{Opt.SSH_COMMAND} names no program")
        self._options = options
        self._host_keys = host_keys
        self._code = code
        self._pythons = tuple(pythons)
        self._environ = environ
        self._kill_switch = kill_switch or KillSwitch()

    def open(self, target: Target, within_s: float) -> Connection:
        """Start the agent through the command within ``within_s`` seconds. Return the connection.
        Raises ConnectError."""
        until = time.monotonic() + within_s
        nonce = os.urandom(16).hex()
        command = remote_command(count=len(self._code), nonce=nonce, pythons=self._pythons)
        argv = [*self._words, *self.options(target), "--", target.host, command]
        user = target.user or self._options.user or ""
        try:
            try:
                connection = ProcessConnection(
                    argv,
                    environ={**self._environ, "SSH_ASKPASS_REQUIRE": "never"},
                    kill_switch=self._kill_switch,
                )
            except OSError as exc:
                raise ConnectStepError(
                    "connect",
                    f"{printable(argv[0])} cannot be run: {exc.strerror or exc}",
                    passing=False,
                ) from exc
            try:
                start_agent(connection, self._code, nonce, until=until, where=target.host)
            except ConnectStepError as error:
                if connection.returncode() != _OWN_FAILURE:
                    raise
                raise parse_ssh_error(connection.stderr_tail(), host=target.host) from error
        except ConnectStepError as error:
            raise ConnectError(error.failure(target.host, user=user)) from error
        connection.limit_waits()
        return connection

    def options(self, target: Target) -> list[str]:
        """Return ssh's options for one host: no questions, forwarding, terminal or shared
        connection."""
        ssh_options = self._options
        argv = ["-T", "-a", "-x"]
        settings = [
            "BatchMode=yes",
            "ClearAllForwardings=yes",
            "ControlMaster=no",
            "ControlPath=none",
            "RemoteCommand=none",
            "PermitLocalCommand=no",
            f"ConnectTimeout={_CONNECT_S}",
        ]
        if self._host_keys is not None:
            settings.append(f"StrictHostKeyChecking={_CHECKS[self._host_keys]}")
        if self._host_keys == "off":
            settings.append("UserKnownHostsFile=/dev/null")
        argv += [argument for setting in settings for argument in ("-o", setting)]
        port, user = target.port or ssh_options.port, target.user or ssh_options.user
        for flag, value in (
            ("-F", ssh_options.config),
            ("-p", port),
            ("-l", user),
            ("-i", ssh_options.key),
        ):
            argv += [flag, str(value)] if value is not None else []
        return argv


def parse_ssh_error(stderr: bytes, *, host: str) -> ConnectStepError:
    """Return the error with the step that failed according to ssh's stderr. No I/O.

    The step is ``connect`` if the text is not known.
    """
    text = stderr.decode(errors="replace")
    lines = [
        line.strip()
        for line in text.splitlines()
        if line.strip() and not _NOISE.match(line.strip())
    ]
    shown = printable(lines[-1])[:_LONGEST] if lines else "ssh failed without a message"
    step: Step
    step, passing = next(
        ((of, may) for pattern, of, may in _MESSAGES if re.search(pattern, text)), ("connect", True)
    )
    hint = None
    if step == "login":
        hint = (
            "ssh-add the key, or ssh-copy-id it to the host: distlaunch cannot ask for a password"
        )
    elif step == "host key":
        named = _NAMED.search(text)
        name = named[1] if named else host
        if offending := _OFFENDING.search(text):
            return changed(f"{printable(offending[1])} has another one", name, _key_scan(name))
        shown = next((printable(line)[:_LONGEST] for line in lines if _NAMED.search(line)), shown)
        return unknown(shown, _key_scan(name))
    return ConnectStepError(step, shown, hint=hint, passing=passing)


def _key_scan(name: str) -> KeyScan:
    host, _, port = name.removeprefix("[").partition("]:")
    return KeyScan(host=host, port=int(port) if port.isascii() and port.isdigit() else SSH_PORT)
