"""A real sshd on loopback with keys of its own, and an agent that follows orders."""

from __future__ import annotations

import io
import os
import pwd
import shutil
import subprocess
import time
import zipfile
from pathlib import Path

from tests.ports import free_port

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin")
_TRIES = 20

STAND_IN = r"""
import hashlib, os, signal, sys, time

def main(word, code_fd):
    os.write(1, b"\ndistlaunch-agent " + word.encode() + b"\n")
    stream = os.fdopen(0, "rb")
    while line := stream.readline():
        what, _, value = line.decode().rstrip("\n").partition(" ")
        if what == "echo":
            write(stream.read(int(value)))
        elif what == "send":
            left = int(value)
            block = bytes(range(256)) * 256
            while left:
                write(block[:left])
                left -= min(left, len(block))
        elif what == "take":
            write(hashlib.sha256(stream.read(int(value))).hexdigest().encode() + b"\n")
        elif what == "pid":
            write(b"%d\n" % os.getpid())
        elif what == "words":
            os.write(2, value.encode() * 1)
            write(b"done\n")
        elif what == "flood":
            left = int(value)
            while left:
                left -= os.write(2, b"w" * min(left, 65536))
            write(b"done\n")
        elif what == "argv":
            write(repr((sys.argv, sys.flags.isolated, sys.flags.no_site, sys.flags.utf8_mode, code_fd)).encode() + b"\n")
        elif what == "sleep":
            time.sleep(float(value))
        elif what == "end":
            os._exit(int(value))
        elif what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)

def write(data):
    while data:
        data = data[os.write(1, data):]
"""


def stand_in(source: str = STAND_IN) -> bytes:
    """Return the zip of a fake agent."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for package in ("distlaunch", "distlaunch/core", "distlaunch/core/agent"):
            file.writestr(f"{package}/__init__.py", "")
        file.writestr("distlaunch/core/agent/main.py", source)
    return packed.getvalue()


class Sshd:
    """One server in a directory of its own. ``settings`` are lines of sshd_config before ours."""

    def __init__(
        self, directory: Path, *settings: str, key_kinds: tuple[str, ...] = ("ed25519",)
    ) -> None:
        assert SSHD is not None, "the tests of SSH need openssh-server"
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.user = pwd.getpwuid(os.getuid()).pw_name
        self.known_hosts = directory / "known_hosts"
        self.key = make_key(directory / "id")
        (directory / "authorized_keys").write_text((directory / "id.pub").read_text())
        self.host_keys = [make_key(directory / f"host_{kind}", kind) for kind in key_kinds]
        self.log = directory / "log"
        self._settings = settings
        self.start()
        self.know()

    def start(self) -> None:
        """Start the listener, on a port that is free."""
        for _ in range(_TRIES):
            self.port = free_port()
            if self._listens():
                return
        raise AssertionError(self.log.read_text())

    def _listens(self) -> bool:
        many = (
            [] if any("MaxStartups" in line for line in self._settings) else ["MaxStartups 1000"]
        )  # the last one wins
        lines = [
            *self._settings,
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            "UsePAM no",
            "StrictModes no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            f"AuthorizedKeysFile {self.directory}/authorized_keys",
            "PidFile none",
            "PermitUserRC no",
            "PrintMotd no",
            "LogLevel VERBOSE",
            *(f"HostKey {key}" for key in self.host_keys),
            *many,
        ]
        config = self.directory / "sshd_config"
        config.write_text("\n".join(lines) + "\n")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(SSHD), "-D", "-e", "-f", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < deadline:
            if b"Server listening" in self.log.read_bytes():
                return True
            time.sleep(0.01)
        self.process.kill()
        self.process.wait()
        return False

    def know(self, name: str | None = None) -> None:
        """Write known_hosts with the host's keys."""
        name = name or f"[127.0.0.1]:{self.port}"
        keys = [Path(f"{key}.pub").read_text().split()[:2] for key in self.host_keys]
        self.known_hosts.write_text("".join(f"{name} {kind} {key}\n" for kind, key in keys))

    def config(self, *lines: str, host: str = "node") -> Path:
        """Write an ssh_config in which ``node`` is this server."""
        path = self.directory / "config"
        own = [
            "HostName 127.0.0.1",
            f"Port {self.port}",
            f"IdentityFile {self.key}",
            "IdentitiesOnly yes",
            "IdentityAgent none",
            f"UserKnownHostsFile {self.known_hosts}",
            "GlobalKnownHostsFile none",
        ]
        path.write_text(f"Host {host}\n" + "".join(f"  {line}\n" for line in (*lines, *own)))
        return path

    def sessions(self) -> list[int]:
        """Return the pids of the processes that serve connections."""
        return children(self.process.pid)

    def close(self) -> None:
        """End the listener and every session."""
        left = descendants(self.process.pid)
        self.process.kill()
        self.process.wait()
        for pid in left:
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue


def make_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    """Make a key pair."""
    size = {"rsa": ["-b", "2048"]}.get(kind, [])
    subprocess.run(
        ["ssh-keygen", "-q", "-t", kind, *size, "-N", passphrase, "-C", "test", "-f", str(path)],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return path


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def descendants(pid: int) -> list[int]:
    return [one for child in children(pid) for one in (child, *descendants(child))]
