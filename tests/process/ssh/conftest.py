"""Real servers on loopback, and both ways to connect to them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from distlaunch.transport.connection import ConnectError, Target
from distlaunch.transport.ssh.config import SshOptions
from distlaunch.transport.ssh.host_keys import HostKeyCheck
from distlaunch.transport.ssh.nodes import SshConnector
from distlaunch.transport.ssh.openssh import SshCommandConnector
from tests.contract.test_links import End
from tests.sshd import Sshd, stand_in

BOUND_S = 60.0


@pytest.fixture(params=["paramiko", "openssh"])
def way(request):
    return request.param


@pytest.fixture
def serve(tmp_path):
    """Start servers. All of them, with their sessions, are gone at the end."""
    started = []

    def start(*settings, name="sshd", **more):
        server = Sshd(tmp_path / name, *settings, **more)
        started.append(server)
        return server

    yield start
    for server in started:
        server.close()


@pytest.fixture
def sshd(serve):
    return serve()


def reach(
    config,
    *,
    way="paramiko",
    mode="strict",
    host="node",
    code=None,
    pythons=(sys.executable,),
    within_s=BOUND_S,
    environ=None,
    options=None,
    user=None,
):
    options = options or SshOptions(config=str(config))
    environ = dict(os.environ) if environ is None else environ
    code = code or stand_in()
    if way == "openssh":
        opener = SshCommandConnector(
            "ssh", options=options, host_keys=mode, code=code, pythons=pythons, environ=environ
        )
    else:
        opener = SshConnector(
            options=options, check=HostKeyCheck(mode), code=code, pythons=pythons, environ=environ
        )
    return opener.open(Target(host=host, user=user), within_s)


def failure(config, **more):
    with pytest.raises(ConnectError) as caught:
        reach(config, **more).close()
    return caught.value.failure


def works(config, **more) -> None:
    link = reach(config, **more)
    try:
        link.send(b"echo 5\nhello")
        assert End(link).read(5) == b"hello"
    finally:
        link.close()


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path
