"""Layer job.transport: which way leads to a node: a child process here, paramiko, or the user's own command."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from distlaunch.job.transport.agentzip import agent_zip
from distlaunch.job.transport.beside import open_beside
from distlaunch.job.transport.hostkeys import HostKeyCheck
from distlaunch.job.transport.link import Link, Open, Target
from distlaunch.job.transport.sshconfig import Asked
from distlaunch.resolve.options import TrainOptions


def opener(options: TrainOptions, environ: Mapping[str, str]) -> Open:
    """Make what opens links to the agents of a job's nodes. The agents' code is packed here, once."""
    from distlaunch.job.transport.ssh import Ssh

    code = agent_zip()
    asked = Asked(user=options.ssh_user, port=options.ssh_port, key=options.ssh_key, config=options.ssh_config)
    check = HostKeyCheck(
        options.ssh_host_keys if options.who_set("ssh_host_keys") or "ssh_host_keys" in options.given else None
    )
    pythons = [path for path in (sys.executable, options.python) if path and os.path.isabs(path)]
    ssh = Ssh(asked=asked, check=check, code=code, pythons=pythons, environ=environ)

    def open_link(target: Target, within_s: float) -> Link:
        if target.here:
            return open_beside(target, within_s, code=code, environ=environ)
        return ssh.open(target, within_s)

    return open_link
