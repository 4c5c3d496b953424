"""The byte streams of SSH connections: a socket, a ProxyCommand, a jump host.

``resolve`` and ``dial`` open the socket and try all addresses of a host.
"""

from __future__ import annotations

import errno
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from distlaunch.core.agent.connect import set_socket_options
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import errno_clause, host_and_port, printable
from distlaunch.core.probe.network import resolve_host, resolve_in_thread
from distlaunch.core.probe.process_limits import explain_refusal
from distlaunch.transport.child_process import Child, KillSwitch
from distlaunch.transport.connect_errors import ConnectStepError

RESOLVE_S = 10.0
CONNECT_S = 10.0
_STAGGER_S = 0.25
"""After this time without an answer, the next address is tried as well (RFC 8305)."""
_STDERR_TAIL = 4 << 10


def resolve(name: str, port: int, *, family: int, until: float) -> list[Address]:
    """Return the addresses of a name before the monotonic time ``until``. Raises
    ConnectStepError."""
    try:
        return _to_addresses(resolve_host(name, port, family=family, numeric=True))
    except (OSError, UnicodeError):
        pass  # usually a name
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    try:
        resolve_in_thread(name, port, found.put, family=family)
    except RuntimeError as exc:
        raise ConnectStepError(
            "resolve", f"no thread can be started for it here: {explain_refusal()}"
        ) from exc
    within_s = max(0.0, min(RESOLVE_S, until - time.monotonic()))
    try:
        result = found.get(timeout=within_s)
    except queue.Empty:
        raise ConnectStepError(
            "resolve", f"the name was not resolved within {within_s:.0f} s"
        ) from None
    if isinstance(result, socket.gaierror):
        raise ConnectStepError(
            "resolve",
            f"the name cannot be resolved: {result.strerror}",
            hint="set the host's address with HostName in ~/.ssh/config or in /etc/hosts",
            passing=result.errno == socket.EAI_AGAIN,
        )
    if isinstance(result, Exception):
        raise ConnectStepError(
            "resolve", f"the name cannot be resolved: {printable(str(result))}", passing=False
        )
    return _to_addresses(result)


def _to_addresses(found: list[tuple[int, tuple[object, ...]]]) -> list[Address]:
    return [Address(family=family, sockaddr=sockaddr) for family, sockaddr in found]


def dial(
    addresses: list[Address], *, until: float, within_s: float | None, bind: str | None
) -> tuple[socket.socket, Address]:
    """Connect to the first address that answers.

    The next address is tried when one fails or is slow, while the slow one goes on. ``within_s``
    limits each address, ``until`` (monotonic) all together; ``bind`` is the local address. Raises
    ConnectStepError if none answers.
    """
    attempts = _Attempts(bind)
    each_s = CONNECT_S if within_s is None else within_s
    until = min(until, time.monotonic() + each_s + _STAGGER_S * (len(addresses) - 1))
    try:
        for address in addresses:
            attempts.begin(address)
            if connected := attempts.wait(min(until, time.monotonic() + _STAGGER_S)):
                return connected
        if connected := attempts.wait(until):
            return connected
    finally:
        attempts.close()
    hint = (
        f"is an SSH server running there on this port? use {Opt.SSH_PORT} for another one"
        if attempts.is_refused
        else None
    )
    raise ConnectStepError("connect", attempts.why_not(), hint=hint)


class _Attempts:
    """Connection attempts in progress."""

    def __init__(self, bind: str | None) -> None:
        self._bind = bind
        self._open: dict[int, tuple[socket.socket, Address]] = {}
        self._poll = select.poll()
        self._failures: list[tuple[Address, str]] = []
        self.is_refused = False

    def begin(self, address: Address) -> None:
        try:
            sock = socket.socket(address.family, socket.SOCK_STREAM)
        except OSError as exc:
            self._add_failure(address, exc.errno)
            return
        sock.settimeout(0.0)
        try:
            if self._bind is not None:
                sock.bind((self._bind, 0))
            sock.connect(address.sockaddr)
        except BlockingIOError:
            pass
        except OSError as exc:
            sock.close()
            self._add_failure(address, exc.errno)
            return
        self._open[sock.fileno()] = (sock, address)
        self._poll.register(sock, select.POLLOUT)

    def wait(self, until: float) -> tuple[socket.socket, Address] | None:
        """Return the first connected socket; None if all failed, or at the monotonic time
        ``until``."""
        while self._open and (left_s := until - time.monotonic()) > 0:
            for descriptor, _ in self._poll.poll(left_s * 1000 + 1):
                self._poll.unregister(descriptor)
                sock, address = self._open.pop(descriptor)
                error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not error:
                    with suppress(OSError):  # it has been reset already
                        set_socket_options(sock)
                    return sock, address
                sock.close()
                self._add_failure(address, error)
        return None

    def _add_failure(self, address: Address, error: int | None) -> None:
        self.is_refused = self.is_refused or error == errno.ECONNREFUSED
        self._failures.append((address, errno_clause(error)))

    def why_not(self) -> str:
        """Return why no address has answered, as a clause. Called after ``close``."""
        failures = self._failures + [(address, "no answer") for _, address in self._open_before]
        whys = {why for _, why in failures}
        if len(whys) == 1:
            return whys.pop()
        return "; ".join(f"{address.text}: {why}" for address, why in failures)

    def close(self) -> None:
        self._open_before = list(self._open.values())
        for sock, _ in self._open_before:
            sock.close()
        self._open.clear()


class Address(Record):
    """One address of a host: family, numeric host and port."""

    family: int
    sockaddr: tuple[Any, ...]

    @property
    def text(self) -> str:
        """``10.0.0.7:22`` or ``[fd00::7]:22``, for messages."""
        host, port = self.sockaddr[:2]
        return host_and_port(host, port)


class SocketStream:
    """A connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock: Any = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLOUT)

    def can_write(self) -> bool:
        """Return whether a short write would not block."""
        try:
            return any(events & select.POLLOUT for _, events in self._poll.poll(0))
        except OSError:
            return False

    def close(self) -> None:
        """Shut the socket down, which wakes threads that use it. The descriptor stays open until
        ``free``."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end was first

    def free(self) -> None:
        """Close the descriptor. Called when no thread uses it any longer."""
        self.sock.close()

    def why_closed(self) -> str:
        """Return "": a socket has no message."""
        return ""


class ProxyCommandStream(SocketStream):
    """A ProxyCommand: a process in its own session, without the terminal, killed with the
    connection."""

    def __init__(self, command: str, environ: Mapping[str, str], kill_switch: KillSwitch) -> None:
        argv = [environ.get("SHELL") or "/bin/sh", "-c", f"exec {command}"]
        try:
            self._child = Child(
                argv, environ={**environ, "SSH_ASKPASS_REQUIRE": "never"}, kill_switch=kill_switch
            )
        except OSError as exc:
            raise ConnectStepError(
                "connect", f"ProxyCommand cannot be run: {exc.strerror or exc}", passing=False
            ) from exc
        super().__init__(self._child.stream)
        self._why = ""
        self._closed = False
        self._asking = threading.Lock()

    def close(self) -> None:
        """End the stream, and kill the process of the command."""
        self.why_closed()  # before it is killed, which may cause other messages
        super().close()
        with self._asking:
            self._closed = True
            self._child.close()

    def why_closed(self) -> str:
        """Return the command's last message, or how it ended; "" while it runs without one."""
        with self._asking:
            if not self._closed:
                stderr_end = self._child.read_stderr()[-_STDERR_TAIL:].decode(errors="replace")
                lines = [
                    printable(line.strip()) for line in stderr_end.splitlines() if line.strip()
                ]
                code = self._child.returncode()
                if lines:
                    self._why = f"ProxyCommand: {lines[-1]}"
                elif code is not None:
                    self._why = f"ProxyCommand ended with {code}"
            return self._why


class JumpStream:
    """A channel through the connection to a jump host."""

    def __init__(
        self, channel: Any, below: Callable[[], bool], release: Callable[[], None]
    ) -> None:
        self.sock: Any = channel
        self._below = below
        self._release = release
        self._closed = False

    def can_write(self) -> bool:
        """Return whether both the channel and the connection to the jump host have room."""
        return self.sock.out_window_size > _STDERR_TAIL and self._below()

    def close(self) -> None:
        """Close the channel. Can be called again."""
        if self._closed:
            return
        self._closed = True
        if self._below():
            try:
                self.sock.close()
            except Exception:  # noqa: BLE001 - EOFError, SSHException, OSError: the jump host is gone
                pass
        self.sock._unlink()  # noqa: SLF001 - wakes threads that wait, without sending to a jump host that may be gone

    def free(self) -> None:
        """Release the jump host's connection. Called when no thread uses the channel any longer."""
        release, self._release = self._release, _already_released
        release()

    def why_closed(self) -> str:
        """Return "", because a channel has no message."""
        return ""


def _already_released() -> None:
    pass
