from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from distlaunch.transport.connection import Target
from distlaunch.transport.ssh.config import SshOptions
from distlaunch.transport.ssh.host_keys import HostKeyCheck
from distlaunch.transport.ssh.nodes import SshConnector
from tests.contract.test_links import End
from tests.facts import mentions
from tests.process.ssh.conftest import BOUND_S, failure, works
from tests.sshd import stand_in


def test_a_closed_port_is_refused(sshd, way):
    config = sshd.config()
    sshd.close()
    failed = failure(config, way=way)
    assert (failed.step, failed.passing) == ("connect", True)
    assert "onnection refused" in failed.text
    sshd.start()


def test_a_server_that_sends_nothing_ends_at_the_deadline(sshd, way):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = sshd.config()
        config.write_text(config.read_text().replace(str(sshd.port), str(silent.getsockname()[1])))
        failed = failure(config, way=way, within_s=2.0)
    assert failed.passing
    if way == "paramiko":
        assert failed.step == "connect"
        assert mentions(failed.text, "SSH version", "in time")


@pytest.mark.parametrize(
    "message",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x1b[2J" * 1000, b"x" * 100_000, b"", b"SSH-2.0-x\r\n"],
)
def test_a_foreign_server_on_the_ssh_port_is_reported(sshd, message):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                try:
                    peer.sendall(message)
                    time.sleep(0.2)
                except OSError:
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        config = sshd.config()
        config.write_text(config.read_text().replace(str(sshd.port), str(server.getsockname()[1])))
        failed = failure(config)
        thread.join()
    assert failed.step == "connect"
    assert failed.text.isprintable()


def test_a_name_that_cannot_be_resolved_is_reported(sshd, way):
    config = sshd.config()
    config.write_text(
        config.read_text().replace("HostName 127.0.0.1", "HostName no-such-host.invalid")
    )
    failed = failure(config, way=way)
    assert failed.step == "resolve"


def test_a_server_that_drops_connections_over_its_limit_is_reported(serve):
    server = serve("MaxStartups 1:100:1", "LoginGraceTime 20")
    with socket.create_connection(("127.0.0.1", server.port)) as first:
        assert first.recv(4) == b"SSH-"
        failed = failure(server.config())
    assert (failed.step, failed.passing) == ("connect", True)
    assert "MaxStartups" in failed.hint or "MaxStartups" in failed.text


def test_a_connection_that_is_cut_in_the_middle_of_the_code_is_reported(serve, tmp_path, way):
    # The code is larger than what pipe and window hold, and nobody reads it before the server is
    # killed.
    server = serve(f"ForceCommand touch {tmp_path}/here; sleep 20")
    cut = threading.Thread(target=lambda: (wait_for(tmp_path / "here"), server.close()))
    cut.start()
    failed = failure(server.config(), way=way, code=os.urandom(8 << 20))
    cut.join()
    assert failed.passing
    server.start()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_broken_configuration_is_reported(tmp_path, sshd, way):
    config = sshd.config()
    config.write_text("NoSuchKeyword yes\n")
    failed = failure(config, way=way)
    assert not failed.passing
    assert "NoSuchKeyword" in failed.text.lower() or "bad configuration" in failed.text


def test_a_configuration_that_is_not_there_is_reported(tmp_path):
    assert "--ssh-config" in failure(tmp_path / "absent").text


# --- proxies


def test_a_jump_host_is_checked_by_its_own_settings(sshd, serve):
    jump = serve(name="jump")
    config = sshd.config("ProxyJump jump")
    jump.known_hosts.write_text("")
    config.write_text(config.read_text() + jump.config(host="jump").read_text())
    failed = failure(config)
    assert failed.step == "host key"
    assert mentions(failed.text, "jump host jump", "not known")


def test_a_chain_of_jump_hosts_is_followed(sshd, serve):
    first, second = serve(name="first"), serve(name="second")
    config = sshd.config("ProxyJump first,second")
    config.write_text(
        config.read_text()
        + first.config(host="first").read_text()
        + second.config(host="second").read_text()
    )
    works(config)
    assert b"Accepted publickey" in first.log.read_bytes()
    assert b"Accepted publickey" in second.log.read_bytes()


def test_jump_hosts_in_a_circle_are_reported(sshd, serve):
    config = sshd.config("ProxyJump node")
    failed = failure(config)
    assert mentions(failed.text, "circle")


def test_a_jump_host_that_reaches_nothing_is_reported_with_the_reason(sshd, serve):
    jump = serve(name="jump")
    config = sshd.config("ProxyJump jump")
    config.write_text(config.read_text() + jump.config(host="jump").read_text())
    sshd.close()
    failed = failure(config)
    assert failed.step == "connect"
    assert mentions(failed.text, "jump host jump", "connect failed")
    sshd.start()


def test_one_login_at_a_jump_host_serves_all_nodes_behind_it(sshd, serve):
    jump = serve(name="jump")
    config = sshd.config("ProxyJump jump")
    config.write_text(config.read_text() + jump.config(host="jump").read_text())
    opener = SshConnector(
        options=SshOptions(config=str(config)),
        check=HostKeyCheck("strict"),
        code=stand_in(),
        pythons=[sys.executable],
        environ=dict(os.environ),
    )
    links = []
    threads = [
        threading.Thread(target=lambda: links.append(opener.open(Target(host="node"), BOUND_S)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(links) == 4
    for link in links[:3]:
        link.close()
    links[3].send(b"echo 5\nhello")
    assert End(links[3]).read(5) == b"hello"
    links[3].close()
    assert jump.log.read_bytes().count(b"Accepted publickey") == 1


def test_a_failed_proxy_command_is_reported_with_its_last_line(sshd):
    failed = failure(sshd.config("ProxyCommand echo no way to %h >&2; exit 1"))
    assert failed.step == "connect"
    assert failed.text.endswith("no way to 127.0.0.1")
    assert mentions(failed.text, "ProxyCommand")


def test_a_proxy_command_that_hangs_is_ended(sshd):
    failed = failure(sshd.config("ProxyCommand sleep 3600"), within_s=2.0)
    assert failed.step == "connect"
