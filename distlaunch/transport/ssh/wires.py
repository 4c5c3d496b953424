"""What an SSH connection runs over: a socket, a ProxyCommand, a channel of a jump host."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from distlaunch.core.model.text import printable
from distlaunch.transport.child_process import Child, Leash
from distlaunch.transport.connect_errors import Trouble

_MOST_WORDS = 4 << 10


class SocketWire:
    """A connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock: Any = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLOUT)

    def can_write(self) -> bool:
        """Tell whether the socket has room; see ``Wire``."""
        try:
            return any(events & select.POLLOUT for _, events in self._poll.poll(0))
        except OSError:
            return False

    def close(self) -> None:
        """Shut it down, which wakes whoever reads or writes; the descriptor stays."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end was first

    def free(self) -> None:
        """Give its descriptor back; see ``Wire``."""
        self.sock.close()

    def why_closed(self) -> str:
        """Know nothing; see ``Wire``."""
        return ""


class CommandWire(SocketWire):
    """A ProxyCommand: a process in a session of its own, never on the terminal, which ends with the connection."""

    def __init__(self, command: str, environ: Mapping[str, str], leash: Leash) -> None:
        argv = [environ.get("SHELL") or "/bin/sh", "-c", f"exec {command}"]
        try:
            self._child = Child(argv, environ={**environ, "SSH_ASKPASS_REQUIRE": "never"}, leash=leash)
        except OSError as exc:
            raise Trouble("connect", f"ProxyCommand cannot be run: {exc.strerror or exc}", passing=False) from exc
        super().__init__(self._child.stream)
        self._why = ""
        self._closed = False
        self._asking = threading.Lock()

    def close(self) -> None:
        """End the process too; see ``Wire``."""
        self.why_closed()  # what it says once it is killed does not count
        super().close()
        with self._asking:
            self._closed = True
            self._child.close()

    def why_closed(self) -> str:
        """Say what the command said last; see ``Wire``."""
        with self._asking:
            if not self._closed:
                said = self._child.said()[-_MOST_WORDS:].decode(errors="replace")
                lines = [printable(line.strip()) for line in said.splitlines() if line.strip()]
                code = self._child.returncode()
                if lines:
                    self._why = f"ProxyCommand said: {lines[-1]}"
                elif code is not None:
                    self._why = f"ProxyCommand ended with {code}"
            return self._why


class JumpWire:
    """A channel through the connection to a jump host."""

    def __init__(self, channel: Any, below: Callable[[], bool], release: Callable[[], None]) -> None:
        self.sock: Any = channel
        self._below = below
        self._release = release
        self._closed = False

    def can_write(self) -> bool:
        """Tell whether the channel has room, and what it runs over; see ``Wire``."""
        return self.sock.out_window_size > _MOST_WORDS and self._below()

    def close(self) -> None:
        """Give the channel up; see ``Wire``."""
        if self._closed:
            return
        self._closed = True
        if self._below():
            try:
                self.sock.close()
            except Exception:  # noqa: BLE001 - EOFError, SSHException, OSError: the jump host is gone
                pass
        self.sock._unlink()  # noqa: SLF001 - wakes whoever waits, without a word to a jump host that does not listen

    def free(self) -> None:
        """Give up the way through the jump host; see ``Wire``."""
        release, self._release = self._release, _nothing
        release()

    def why_closed(self) -> str:
        """Know nothing; see ``Wire``."""
        return ""


def _nothing() -> None:
    pass
