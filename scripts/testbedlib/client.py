"""A test bed of hosts as its user has it: commands on the hosts, the processes of each, certain ends.

For tests, benchmarks and fault injection: ``with Hosts.started(4) as hosts: hosts.run("n1", "hostname")``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from testbedlib import hosts as bed
from testbedlib import layout, sandbox
from testbedlib.host import SSHD
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


class Hosts:
    """A running test bed. Every command runs in a minimal environment, and ends with the test bed at the latest."""

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
        self._keeper = keeper
        self._enter = {name: bed.enter_words(directory, self.init, name) for name in (*self.layout, bed.SWITCH)}
        self._inits = {name: self._namespaces(name) for name in self.layout}
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
        """Bring up a test bed of our own; it ends with ``close``, or with this process. Raises TestbedError."""
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
        """End the test bed if we started it, and wait until nothing of it is left. Raises TestbedError if it failed."""
        if self._keeper is None:
            return
        keeper, self._keeper = self._keeper, None
        said, _ = keeper.communicate(timeout=_STOP_S)
        if keeper.returncode:
            raise TestbedError(f"the keeper ended with {keeper.returncode}: {said.decode(errors='replace')}")

    # --- addresses ---------------------------------------------------------------------------------------------------

    def address(self, host: str, network: int = 0) -> str:
        """Give a host's address in a network: IPv4 where there is one."""
        return next(link.address for link in self.layout[host].links if link.network == network)

    def address6(self, host: str, network: int = 0) -> str:
        """Give a host's IPv6 address in a network."""
        return next(link.ipv6 for link in self.layout[host].links if link.network == network)

    # --- commands ----------------------------------------------------------------------------------------------------

    def words(self, host: str, argv: Words, cwd: str | os.PathLike[str] = "/") -> list[str]:
        """Give the words that run a command on a host; ``host`` may be ``switch``, too."""
        return [*self._enter[host], "env", f"--chdir={os.fspath(cwd)}", *map(os.fspath, argv)]

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
        """Run a command on a host, not by SSH; one word is a shell's script. Raises AssertionError if it fails."""
        command = ["sh", "-c", os.fspath(argv[0])] if len(argv) == 1 else argv
        done = subprocess.run(
            self.words(host, command, cwd),
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env={**self.env, **(env or {})},
        )
        if check and done.returncode:
            raise AssertionError(f"{argv} on {host} ended with {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def popen(
        self,
        host: str,
        argv: Words,
        *,
        cwd: str | os.PathLike[str] = "/",
        env: Mapping[str, str] | None = None,
        **popen: Any,
    ) -> Started:
        """Start a command on a host."""
        return Started(
            subprocess.Popen(self.words(host, argv, cwd), env={**self.env, **(env or {})}, **popen), self._inits[host]
        )

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

    # --- processes ---------------------------------------------------------------------------------------------------

    def processes(self, host: str) -> list[Process]:
        """List a host's processes: all but its first, and sshd's own."""
        return [process for process in self.everything(host) if process.executable != SSHD]

    def sessions(self, host: str) -> list[Process]:
        """List the processes of a host's sshd: the listener first, then two or so for each connection."""
        found = [process for process in self.everything(host) if process.executable == SSHD]
        return sorted(found, key=lambda process: "[listener]" not in process.argv[0])

    def everything(self, host: str) -> list[Process]:
        """List all that runs in a host's network or among its pids, its first process left out.

        Found by namespace, whatever a process did to its session, name, parent or environment.
        """
        found = []
        network, pids, first = self._inits[host]
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == first:
                continue
            process = _look_at(name, network, pids)
            if process is not None:
                found.append(process)
        return found

    def assert_clean(self, within_s: float = 10.0, *, but: Sequence[int] = ()) -> None:
        """Fail unless every process on every host is gone in time, the pids in ``but`` and sshd left out."""
        deadline = time.monotonic() + within_s
        while left := {
            name: [process for process in self.processes(name) if process.pid not in but] for name in self.layout
        }:
            left = {name: processes for name, processes in left.items() if processes}
            if not left:
                return
            if time.monotonic() > deadline:
                lines = [f"{name}: {process.pid} {process.argv}" for name in left for process in left[name]]
                raise AssertionError(f"still there after {within_s} s:\n" + "\n".join(lines))
            time.sleep(0.02)

    def _namespaces(self, host: str) -> tuple[str, str, int]:
        """Name a host's network and pids, and give the pid of its first process."""
        links = [os.readlink(bed.namespace(self.directory, self.init, host, name)) for name in ("net", "pid")]
        for name in os.listdir("/proc"):
            try:
                if name.isdigit() and os.readlink(f"/proc/{name}/ns/pid") == links[1]:
                    with open(f"/proc/{name}/status", encoding="utf-8", errors="replace") as file:
                        status = dict(line.split(":", 1) for line in file if ":" in line)
                    if status["NSpid"].split()[-1] == "1":
                        return links[0], links[1], int(name)
            except OSError:
                continue
        raise TestbedError(f"{host} has lost its first process")


class Started:
    """A command on a host: ``process`` is what entered the host and waits there, ``pid`` the command itself."""

    def __init__(self, process: subprocess.Popen[bytes], host: tuple[str, str, int]) -> None:
        self.process = process
        self._pids = host[1]
        self.pid = self._find()

    def _find(self) -> int:
        """Wait for the child that the entering process forks."""
        while self.process.poll() is None:
            try:
                with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children", encoding="ascii") as file:
                    children = file.read().split()
                if children and os.readlink(f"/proc/{children[0]}/ns/pid") == self._pids:
                    return int(children[0])
            except OSError:
                pass
            time.sleep(0.0005)
        return 0

    def send_signal(self, number: int) -> None:
        """Signal the command itself, if it still runs; what entered the host stops and goes on with it."""
        if self.process.poll() is None and self.pid:
            os.kill(self.pid, number)
            if number == signal.SIGCONT:
                self.process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to the command itself."""
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Give the exit code, if it has ended: -N for signal N."""
        return self.process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and give the exit code."""
        return self.process.wait(timeout)

    def communicate(self, text: bytes | None = None, timeout: float | None = None) -> tuple[bytes, bytes]:
        """Read all it writes, and wait for its end."""
        return self.process.communicate(text, timeout)


def _look_at(name: str, network: str, pids: str) -> Process | None:
    """Read a process if it belongs to a host; one that only waits to be reaped is no more."""
    try:
        if os.readlink(f"/proc/{name}/ns/net") != network and os.readlink(f"/proc/{name}/ns/pid") != pids:
            return None
        with open(f"/proc/{name}/cmdline", "rb") as file:
            argv = file.read().rstrip(b"\0").decode(errors="replace").split("\0")
        with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
        executable = os.readlink(f"/proc/{name}/exe")
    except OSError:
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
