"""Consoles whose descriptors are memory files, pipes and real terminals."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import threading

import pytest

from distlaunch.console.console import open_console


class Clock:
    """A monotonic clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Memory:
    """A console on two memory files, which tests read after ``close``."""

    def __init__(self, *, world_size: int, same: bool = False, **options) -> None:
        self._out = os.memfd_create("out")
        self._err = self._out if same else os.memfd_create("err")
        self.clock = Clock()
        self.console = open_console(
            world_size=world_size,
            environ={},
            stdout_fd=self._out,
            stderr_fd=self._err,
            clock=self.clock,
            wall=lambda: 1000.5,
            **options,
        )

    def read(self) -> tuple[bytes, bytes]:
        lost = self.console.close(timeout_s=None)
        assert lost == 0
        found = tuple(os.pread(fd, 1 << 30, 0) for fd in (self._out, self._err))
        for fd in {self._out, self._err}:
            os.close(fd)
        return found

    def stdout(self) -> bytes:
        return self.read()[0]


class Terminal:
    """A real pseudo-terminal. A thread reads its output, unless it is stopped."""

    def __init__(self, *, columns: int = 80) -> None:
        self.master, self.fd = os.openpty()
        modes = termios.tcgetattr(self.fd)
        modes[1] &= ~termios.OPOST  # bytes arrive as they were written
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(self.fd, termios.TCSANOW, modes)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._seen = bytearray()
        self._cond = threading.Condition()
        self._running = threading.Event()
        self._running.set()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.master, 1 << 16)
            except OSError:  # EIO: the other side has been closed
                return
            with self._cond:
                self._seen += data
                self._cond.notify_all()

    def stop(self) -> None:
        """Stop output, as Ctrl-S does."""
        termios.tcflow(self.fd, termios.TCOOFF)

    def go_on(self) -> None:
        termios.tcflow(self.fd, termios.TCOON)

    def wait_for(self, text: bytes) -> bytes:
        with self._cond:
            assert self._cond.wait_for(lambda: text in self._seen, 20), bytes(self._seen[-2000:])
            return bytes(self._seen)

    def close(self) -> bytes:
        """Close the terminal and return all of its output."""
        os.close(self.fd)
        self._thread.join(20)
        os.close(self.master)
        return bytes(self._seen)


class Screen:
    """A console with stderr and, unless redirected, stdout on a terminal."""

    def __init__(self, *, world_size: int = 2, columns: int = 80, environ=None, **options) -> None:
        self.terminal = Terminal(columns=columns)
        self.clock = Clock()
        self.console = open_console(
            world_size=world_size,
            environ={"NO_COLOR": "1"} if environ is None else environ,
            stderr_fd=self.terminal.fd,
            clock=self.clock,
            **{"stdout_fd": self.terminal.fd, **options},
        )
        self._ended: bytes | None = None

    def read(self) -> bytes:
        if self._ended is None:
            self.console.close(timeout_s=None)
            self._ended = self.terminal.close()
        return self._ended


@pytest.fixture(scope="session")
def memory():
    return Memory


@pytest.fixture
def terminal():
    made = Terminal()
    yield made
    made.go_on()
    made.close()


@pytest.fixture
def screen():
    opened: list[Screen] = []

    def make(**options) -> Screen:
        opened.append(Screen(**options))
        return opened[-1]

    yield make
    for each in opened:
        each.terminal.go_on() if each._ended is None else None
        each.read()
