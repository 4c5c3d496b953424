from __future__ import annotations

import os
import pty
import socket
import subprocess
import time

import pytest

from distlaunch.transport.connection import ConnectError
from distlaunch.transport.ssh.config import SshOptions
from tests.facts import mentions
from tests.process.ssh.conftest import failure, program, reach, works
from tests.sshd import make_key


def test_a_key_that_is_not_taken_is_reported(sshd, tmp_path, way):
    other = make_key(tmp_path / "other")
    config = sshd.config()
    config.write_text(config.read_text().replace(str(sshd.key), str(other)))
    failed = failure(config, way=way)
    assert (failed.step, failed.passing) == ("login", False)
    if way == "paramiko":
        assert mentions(failed.text, "no key", "1 tried")
        copy = f"ssh-copy-id -p {sshd.port} {sshd.user}@127.0.0.1"
        assert mentions(failed.hint, sshd.user, "--ssh-user", copy)
        assert (failed.user, failed.address) == (sshd.user, f"127.0.0.1:{sshd.port}")
    else:
        assert "Permission denied (publickey)" in failed.text


def test_no_key_at_all_is_reported(sshd, tmp_path):
    config = sshd.config()
    config.write_text(config.read_text().replace(str(sshd.key), str(tmp_path / "absent")))
    failed = failure(config)
    assert failed.step == "login"
    assert mentions(failed.text, "no key", f"{tmp_path}/absent")


def test_a_key_with_a_passphrase_is_named(sshd, tmp_path, way):
    locked = make_key(tmp_path / "locked", passphrase="secret")
    config = sshd.config()
    config.write_text(config.read_text().replace(str(sshd.key), str(locked)))
    failed = failure(config, way=way)
    assert failed.step == "login"
    if way == "paramiko":
        assert mentions(failed.text, locked, "passphrase")
        assert failed.hint.startswith(f"ssh-add {locked}")


@pytest.mark.parametrize("only", ["yes", "no"])
def test_a_key_of_the_agent_is_used(sshd, tmp_path, way, only, monkeypatch):
    os.system(f"ssh-keygen -q -p -P '' -N secret -f {sshd.key}")
    with ssh_agent(tmp_path) as (sock, add):
        add(sshd.key, "secret")
        path = sshd.config()
        path.write_text(
            path.read_text()
            .replace("IdentityAgent none", f"IdentityAgent {sock}")
            .replace("IdentitiesOnly yes", f"IdentitiesOnly {only}")
        )
        works(path, way=way)


class ssh_agent:  # noqa: N801 - used as a function
    def __init__(self, tmp_path) -> None:
        self.sock = tmp_path / "agent.sock"

    def __enter__(self):
        self.process = subprocess.Popen(
            ["ssh-agent", "-D", "-a", str(self.sock)], stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 30
        with socket.socket(socket.AF_UNIX) as caller:
            while caller.connect_ex(str(self.sock)):  # the file is there before it listens
                assert time.monotonic() < deadline
                time.sleep(0.01)
        return self.sock, self._add

    def _add(self, key, passphrase):
        asks = program(self.sock.parent / "askpass", f"#!/bin/sh\necho {passphrase}\n")
        environ = {
            **os.environ,
            "SSH_AUTH_SOCK": str(self.sock),
            "SSH_ASKPASS": str(asks),
            "SSH_ASKPASS_REQUIRE": "force",
        }
        subprocess.run(
            ["ssh-add", "-q", str(key)], env=environ, check=True, stdin=subprocess.DEVNULL
        )

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()


def test_an_agent_that_does_not_answer_holds_up_nobody(sshd, tmp_path):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent"))
        silent.listen()
        path = sshd.config()
        path.write_text(
            path.read_text().replace("IdentityAgent none", f"IdentityAgent {tmp_path}/silent")
        )
        works(path)


def test_a_server_that_takes_only_passwords_is_reported(serve):
    failed = failure(serve("PasswordAuthentication yes", "PubkeyAuthentication no").config())
    assert failed.step == "login"
    assert mentions(failed.text, "no keys", "only password")


def test_a_server_that_wants_a_password_beside_the_key_is_reported(serve):
    server = serve("AuthenticationMethods publickey,password", "PasswordAuthentication yes")
    failed = failure(server.config())
    assert mentions(failed.text, "accepts", "also requires password")


def test_the_user_and_key_of_the_command_line_beat_the_file(sshd, way):
    config = sshd.config("User nobody-of-this-name")
    config.write_text(
        "\n".join(line for line in config.read_text().splitlines() if "IdentityFile" not in line)
    )
    works(
        config, way=way, options=SshOptions(config=str(config), user=sshd.user, key=str(sshd.key))
    )
    works(
        config,
        way=way,
        options=SshOptions(config=str(config), user="other", key=str(sshd.key)),
        user=sshd.user,
    )


def test_nobody_is_asked_for_a_password(serve, way):
    """Neither way may open the terminal: nothing is written to it."""
    server = serve("PasswordAuthentication yes", "PubkeyAuthentication no")
    config = server.config()
    pid, terminal = pty.fork()
    if pid == 0:
        failed = None
        try:
            reach(config, way=way)
        except ConnectError as exc:
            failed = exc.failure
        os._exit(0 if failed is not None and failed.step == "login" else 1)
    message = b""
    while True:
        try:
            data = os.read(terminal, 1000)
        except OSError:
            break
        if not data:
            break
        message += data
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0, message
    assert message == b""
