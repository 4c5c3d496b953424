"""Choose how a node is reached: by a child process on this machine, by paramiko, or by the user's
command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from distlaunch.planning.train_options import TrainOptions
from distlaunch.transport.bootstrap import agent_zip
from distlaunch.transport.child_process import KillSwitch, open_local_agent
from distlaunch.transport.connection import Connection, Open, Target
from distlaunch.transport.ssh.config import SshOptions
from distlaunch.transport.ssh.host_keys import HostKeyCheck, Unchecked
from distlaunch.transport.ssh.nodes import SshConnector
from distlaunch.transport.ssh.openssh import SshCommandConnector


class Connectors(NamedTuple):
    """The ways to open connections: by paramiko, by the user's ssh command, on this machine."""

    ssh: Callable[..., Connector] = SshConnector
    ssh_command: Callable[..., Connector] = SshCommandConnector
    local: Callable[..., Connection] = open_local_agent


class Connector(Protocol):
    """Opens connections to the agents of other machines."""

    def open(self, target: Target, within_s: float) -> Connection:
        """Start an agent on a node and return the connection to it.

        Blocks for at most ``within_s`` seconds. Raises ConnectError. Several threads may call this.
        """


def opener(
    options: TrainOptions,
    environ: Mapping[str, str],
    kill_switch: KillSwitch,
    *,
    note: Callable[[str], None] = lambda _: None,
    logged_in: Callable[[Target], None] = lambda _: None,
    connectors: Connectors = Connectors(),  # noqa: B008 - a constant
) -> Open:
    """Return the function that opens connections to the agents of a job.

    ``note`` gets lines for the user, from any thread. ``logged_in`` gets a node whose agent is
    being started; with ``--ssh-command`` it is not called. Programs that carry bytes are attached
    to the kill switch. Raises ConfigError if ``--ssh-command`` is not a command.
    """
    code = agent_zip()
    ssh_options = SshOptions(
        user=options.ssh_user, port=options.ssh_port, key=options.ssh_key, config=options.ssh_config
    )
    chosen = options.who_set("ssh_host_keys") is not None or "ssh_host_keys" in options.given
    host_keys = (
        options.ssh_host_keys if chosen else None
    )  # None: the user's StrictHostKeyChecking applies
    pythons = [path for path in (sys.executable, options.python) if path and os.path.isabs(path)]
    unchecked = Unchecked(note)
    by_ssh: Open
    if options.ssh_command is not None:
        by_ssh = connectors.ssh_command(
            options.ssh_command,
            options=ssh_options,
            host_keys=host_keys,
            code=code,
            pythons=pythons,
            environ=environ,
            kill_switch=kill_switch,
        ).open
    else:
        check = HostKeyCheck(host_keys, unchecked)
        by_ssh = connectors.ssh(
            options=ssh_options,
            check=check,
            code=code,
            pythons=pythons,
            environ=environ,
            kill_switch=kill_switch,
            logged_in=logged_in,
        ).open

    def open_connection(target: Target, within_s: float) -> Connection:
        if target.here:
            return connectors.local(target, within_s, code=code, environ=environ)
        if host_keys == "off" and options.ssh_command is not None:
            unchecked.say()
        return by_ssh(target, within_s)

    return open_connection
