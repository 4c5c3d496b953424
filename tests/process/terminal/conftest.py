"""Terminals whose foreground job is the launcher. The test types and reads."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import socket
import struct
import subprocess
import sys
import termios
import time

import pytest

from tests.launcher import PROGRAMS

SHELL = PROGRAMS / "output_shell.py"
ROWS, COLUMNS = 30, 200
HOLD = f"import os, signal, sys, time\nsys.path.insert(0, {str(PROGRAMS)!r})\nimport survivor\nsurvivor.hold()\n"


def _as_a_login_shell_starts_it() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Screen:
    """A terminal. The test types and reads."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(ROWS, COLUMNS)
        self.seen = b""
        self.modes_before = self.modes()

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def modes(self) -> list[object]:
        modes = termios.tcgetattr(self.slave)
        # The pending-input flag is the kernel's own: it sets it when canonical mode comes back.
        modes[3] &= ~getattr(termios, "PENDIN", 0)
        return modes

    def streams(self) -> dict[str, object]:
        """Make this the controlling terminal and the three streams of a process of its own
        session."""
        return {
            "stdin": self.slave,
            "stdout": self.slave,
            "stderr": self.slave,
            "start_new_session": True,
            "preexec_fn": _as_a_login_shell_starts_it,
        }

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def look(self, timeout_s: float = 0.0) -> bool:
        """Read what is there. Return whether there was something."""
        if not select.select([self.master], [], [], timeout_s)[0]:
            return False
        self.seen += os.read(self.master, 1 << 16)
        return True

    def wait_text(self, text: str, *, after: int = 0, timeout_s: float = 30.0) -> int:
        """Read until ``text`` has come. Return the position after it."""
        deadline = time.monotonic() + timeout_s
        while (at := self.seen.find(text.encode(), after)) < 0:
            if (
                not self.look(max(0.0, deadline - time.monotonic()))
                and time.monotonic() >= deadline
            ):
                pytest.fail(
                    f"no {text!r} on the terminal:\n{self.seen[-3000:].decode(errors='replace')}"
                )
        return at + len(text.encode())

    def read_until_end(self, running, timeout_s: float = 40.0):
        """Read until the launcher has ended, so that it never waits for us. Return how it ended."""
        deadline = time.monotonic() + timeout_s
        while running.process.poll() is None and time.monotonic() < deadline:
            self.look(0.02)
        while self.look():
            pass
        return running.wait(1)

    def rendered(self) -> list[str]:
        """Return the screen for text with carriage returns, newlines, erasing and colours only."""
        lines, column = [""], 0
        for token in re.findall(
            r"\x1b\[[0-9;:?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+|\x1b", self.seen.decode(errors="replace")
        ):
            if token == "\r":
                column = 0
            elif token == "\n":
                lines.append("")
            elif token.startswith("\x1b"):
                assert token[-1] in "mK", f"a terminal was sent {token!r}"
                if token[-1] == "K":
                    lines[-1] = lines[-1][:column]
            else:
                lines[-1] = lines[-1][:column] + token + lines[-1][column + len(token) :]
                column += len(token)
        return lines

    def drawn(self) -> list[str]:
        """Return the rows of a terminal of this size."""
        import pyte

        rows, columns, *_ = struct.unpack(
            "HHHH", fcntl.ioctl(self.slave, termios.TIOCGWINSZ, bytes(8))
        )
        emulator = pyte.Screen(columns, rows)
        pyte.ByteStream(emulator).feed(self.seen)
        return [row.rstrip() for row in emulator.display]

    def close(self) -> None:
        for end in (self.master, self.slave):
            try:
                os.close(end)
            except OSError:
                continue


@pytest.fixture
def screen():
    screen = Screen()
    yield screen
    screen.close()


@pytest.fixture
def on_screen(distlaunch, screen):
    """Start ``train`` on the terminal."""

    def start(*args, **kwargs):
        env = {"TERM": "xterm", **kwargs.pop("env", {})}
        return distlaunch.start(["train", *args], env=env, **{**screen.streams(), **kwargs})

    return start


class Shell:
    """The launcher as the foreground job of a shell."""

    def __init__(self, distlaunch, screen: Screen, *args: str) -> None:
        self.mine, theirs = socket.socketpair()
        self.mine.settimeout(40)
        self._text = b""
        command = [
            sys.executable,
            str(SHELL),
            str(theirs.fileno()),
            sys.executable,
            "-m",
            "distlaunch",
            "train",
            *args,
        ]
        self.process = subprocess.Popen(
            command,
            env={**distlaunch.env, "TERM": "xterm"},
            cwd=distlaunch.work,
            pass_fds=(theirs.fileno(),),
            **screen.streams(),
        )
        theirs.close()
        self.launcher = int(self.reported().split()[1])

    def reported(self) -> str:
        while b"\n" not in self._text:
            part = self.mine.recv(100)
            assert part, "the shell has ended"
            self._text += part
        line, _, self._text = self._text.partition(b"\n")
        return line.decode()

    def continue_job(self) -> None:
        self.mine.sendall(b"fg\n")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.mine.close()


@pytest.fixture
def shell(distlaunch, screen):
    shells: list[Shell] = []

    def start(*args: str) -> Shell:
        shells.append(Shell(distlaunch, screen, *args))
        return shells[-1]

    yield start
    for one in shells:
        one.close()


def script(distlaunch, source: str) -> str:
    path = distlaunch.work / "worker.py"
    path.write_text(HOLD + source)
    return str(path)
