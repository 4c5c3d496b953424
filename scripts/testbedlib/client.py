"""A test bed of hosts as its user has it: commands on the hosts, the processes of each, certain
ends.

For tests, benchmarks and fault injection: ``with Hosts.started(4) as hosts: hosts.run("n1",
"hostname")``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from testbedlib import entering, kernel, layout, sandbox, users
from testbedlib import hosts as bed
from testbedlib.layout import HEAD
from testbedlib.sandbox import TestbedError

if TYPE_CHECKING:
    from typing_extensions import Self

TESTBED = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "testbed")
_STOP_S = 60.0
Words = Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process on a host."""

    pid: int
    """As this machine counts, not as the host does."""
    argv: tuple[str, ...]
    state: str
    """The letter of proc(5)."""
    executable: str

    @property
    def is_sshd(self) -> bool:
        """Whether it is sshd's own, not what that has started; since OpenSSH 9.8 sessions have
        their own program."""
        return os.path.basename(self.executable) in {"sshd", "sshd-session", "sshd-auth"}


class Hosts:
    """A running test bed. Every command runs in a minimal environment, and ends with the test bed
    at the latest."""

    def __init__(self, directory: str, keeper: subprocess.Popen[bytes] | None = None) -> None:
        """Use a test bed that is up; ``keeper``, if given, is ended by ``close``."""
        self.directory = directory
        self.environment = sandbox.environment(directory)
        self.init = sandbox.init_of(directory)
        with open(f"{directory}/hosts.json", encoding="ascii") as file:
            self.layout = {host.name: host for host in layout.from_json(file.read())}
        self.names = [name for name in self.layout if name != HEAD]
        """The hosts beside the head."""
        self.home = self.environment["TESTBED_HOME"]
        self.ssh_config = self.environment["TESTBED_SSH_CONFIG"]
        self.local = f"{directory}/local"
        """A small disk of each host's own."""
        self.shared = f"{directory}/shared"
        """The same on all hosts, and open to all users; a test's own directory is root's."""
        self.users = users.present()
        """The login shells of the users beside root, by name."""
        self._keeper = keeper
        everywhere = (*self.layout, bed.SWITCH)
        self._namespaces = {name: bed.namespaces(directory, self.init, name) for name in everywhere}
        self._identities = {name: self._identity(name) for name in self.layout}
        self.env = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": self.home,
            "LANG": "C.UTF-8",
            "USER": "root",
            "LOGNAME": "root",
            "SHELL": "/bin/bash",
            **self.environment,
        }
        """What commands get."""

    @classmethod
    def started(cls, count: int, *options: str, errors: IO[bytes] | None = None) -> Self:
        """Bring up a test bed of our own; it ends with ``close``, or with this process. Raises
        TestbedError."""
        keeper = subprocess.Popen(
            [sys.executable, TESTBED, "hosts", "hold", str(count), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        assert keeper.stdout is not None
        answer = json.loads(keeper.stdout.readline() or '{"error": "the test bed ended at once"}')
        if "environment" not in answer:
            keeper.communicate()
            raise TestbedError(answer["error"])
        return cls(answer["directory"], keeper)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the test bed if we started it, and wait until nothing of it is left. Raises
        TestbedError if it failed."""
        if self._keeper is None:
            return
        keeper, self._keeper = self._keeper, None
        message, _ = keeper.communicate(timeout=_STOP_S)
        if keeper.returncode:
            raise TestbedError(
                f"the keeper ended with {keeper.returncode}: {message.decode(errors='replace')}"
            )

    # --- addresses ---------------------------------------------------------------------------------------------------

    def address(self, host: str, network: int = 0) -> str:
        """Return a host's address in a network: IPv4 where there is one."""
        return next(link.address for link in self.layout[host].links if link.network == network)

    def address6(self, host: str, network: int = 0) -> str:
        """Return a host's IPv6 address in a network."""
        return next(link.ipv6 for link in self.layout[host].links if link.network == network)

    # --- commands ----------------------------------------------------------------------------------------------------

    def run(
        self,
        host: str,
        *argv: str | os.PathLike[str],
        stdin: str = "",
        timeout_s: float = 60.0,
        check: bool = True,
        cwd: str | os.PathLike[str] = "/",
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, or ``switch``, not by SSH; one word is a shell's script.

        Raises AssertionError if it fails.
        """
        command = ["sh", "-c", os.fspath(argv[0])] if len(argv) == 1 else argv
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env=self._environment(host, env),
            preexec_fn=entering.preparation(self._namespaces[host], os.fspath(cwd)),
        )
        if check and done.returncode:
            raise AssertionError(
                f"{argv} on {host} ended with {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done

    def popen(
        self,
        host: str,
        argv: Words,
        *,
        cwd: str | os.PathLike[str] = "/",
        env: Mapping[str, str] | None = None,
        preexec_fn: Callable[[], object] | None = None,
        **popen: Any,
    ) -> Started:
        """Start a command on a host."""
        process = subprocess.Popen(
            argv,
            env=self._environment(host, env),
            preexec_fn=entering.preparation(self._namespaces[host], os.fspath(cwd), preexec_fn),  # noqa: PLW1509 - no threads
            **popen,
        )
        return Started(process)

    def launch(
        self,
        args: Words,
        *,
        python: str = sys.executable,
        host: str = HEAD,
        cwd: str | os.PathLike[str] = "/",
        env: Mapping[str, str] | None = None,
        **popen: Any,
    ) -> Started:
        """Start the launcher, on the head by default."""
        return self.popen(host, [python, "-m", "distlaunch", *args], cwd=cwd, env=env, **popen)

    def socket(self, host: str, family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
        """Return a socket in a host's network, for code in this process. It needs addresses, not
        names."""
        back, there = (
            os.open(path, os.O_RDONLY)
            for path in ("/proc/thread-self/ns/net", self._namespaces[host]["net"])
        )
        try:
            kernel.setns(there)
            try:
                return socket.socket(family, socket.SOCK_STREAM)
            finally:
                kernel.setns(back)
        finally:
            os.close(back)
            os.close(there)

    def _environment(self, host: str, more: Mapping[str, str] | None) -> dict[str, str]:
        clock = self.layout[host].clock_variables() if host in self.layout else {}
        return {**self.env, **clock, **(more or {})}

    # --- processes ---------------------------------------------------------------------------------------------------

    def processes(self, host: str) -> list[Process]:
        """List a host's processes: all but its first, and sshd's own."""
        return [process for process in self.everything(host) if not process.is_sshd]

    def sessions(self, host: str) -> list[Process]:
        """List the processes of a host's sshd: the listener first, then two or so for each
        connection."""
        found = [process for process in self.everything(host) if process.is_sshd]
        return sorted(found, key=lambda process: "[listener]" not in process.argv[0])

    def everything(self, host: str) -> list[Process]:
        """List all that runs in a host's network or among its pids, its first process left out.

        Found by namespace, whatever a process did to its session, name, parent or environment.
        """
        found = []
        identity = self._identities[host]
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == identity.first:
                continue
            process = _look_at(name, identity)
            if process is not None:
                found.append(process)
        return found

    def assert_clean(self, within_s: float = 30.0, *, but: Sequence[int] = ()) -> None:
        """Fail unless every process on every host is gone in time, the pids in ``but`` and sshd
        left out."""
        deadline = time.monotonic() + within_s
        while left := {
            name: [process for process in self.processes(name) if process.pid not in but]
            for name in self.layout
        }:
            left = {name: processes for name, processes in left.items() if processes}
            if not left:
                return
            if time.monotonic() > deadline:
                lines = [
                    f"{name}: {process.pid} {process.argv}"
                    for name in left
                    for process in left[name]
                ]
                raise AssertionError(f"still there after {within_s} s:\n" + "\n".join(lines))
            time.sleep(0.02)

    def _identity(self, host: str) -> _Identity:
        links = {name: os.readlink(file) for name, file in self._namespaces[host].items()}
        for name in os.listdir("/proc"):
            try:
                if name.isdigit() and os.readlink(f"/proc/{name}/ns/pid") == links["pid"]:
                    with open(f"/proc/{name}/status", encoding="utf-8", errors="replace") as file:
                        status = dict(line.split(":", 1) for line in file if ":" in line)
                    if status["NSpid"].split()[-1] == "1":
                        return _Identity(network=links["net"], pids=links["pid"], first=int(name))
            except OSError:
                continue
        raise TestbedError(f"{host} has lost its first process")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Identity:
    """By what a host's processes are known."""

    network: str
    pids: str
    first: int
    """The pid of the host's first process, as this machine counts."""


class Started:
    """A command on a host: ``process`` stands for it outside and takes signals for it; ``pid`` is
    the command's own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        with open(f"/proc/{process.pid}/task/{process.pid}/children", encoding="ascii") as file:
            self.pid = int(file.read() or 0)
        """As this machine counts; 0 if it has ended already."""

    def send_signal(self, number: int) -> None:
        """Signal the command, if it still runs."""
        if number not in {signal.SIGSTOP, signal.SIGKILL}:
            self.process.send_signal(number)
        elif self.process.poll() is None and self.pid:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the command."""
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Return the exit code, if it has ended: -N for signal N."""
        return self.process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and give the exit code."""
        return self.process.wait(timeout)

    def communicate(
        self, text: bytes | None = None, timeout: float | None = None
    ) -> tuple[bytes, bytes]:
        """Read all it writes, and wait for its end."""
        return self.process.communicate(text, timeout)


def _look_at(name: str, host: _Identity) -> Process | None:
    """Read a process if it belongs to a host; one that only waits to be reaped is no more."""
    try:
        among_its_pids = os.readlink(f"/proc/{name}/ns/pid") == host.pids
        if not among_its_pids and os.readlink(f"/proc/{name}/ns/net") != host.network:
            return None
        with open(f"/proc/{name}/cmdline", "rb") as file:
            argv = file.read().rstrip(b"\0").decode(errors="replace").split("\0")
        with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
        executable = os.readlink(f"/proc/{name}/exe")
    except OSError:
        return None
    if (
        not among_its_pids and os.path.basename(executable) == "nsenter"
    ):  # it waits outside for one that is inside
        return None
    return Process(pid=int(name), argv=tuple(argv), state=state, executable=executable)


def until(condition: Callable[[], Any], what: str, within_s: float = 30.0) -> Any:
    """Return ``condition()`` once it is true. Raises AssertionError after ``within_s`` seconds."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s} s: {what}")
        time.sleep(0.01)
    return value
