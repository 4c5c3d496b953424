"""Connect the only worker to the user's terminal, for debuggers and progress bars.

The worker gets a pseudo-terminal. Keys and output pass unchanged.
"""

from __future__ import annotations

import os
import termios
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

from distlaunch.console.console import TERMINAL_CLOSE_S, launcher_lines
from distlaunch.console.writer import Writer
from distlaunch.coordinator.runtime.sink import StatusView
from distlaunch.core.agent.workers.pseudo_terminal import in_foreground, modes_that_pass_keys_on
from distlaunch.core.model.run_files import STDERR, STDOUT

_STDIN = 0
_KEYS = 4096


def user_terminal() -> UserTerminal | None:
    """Return the terminal if descriptors 0 to 2 are all terminals and this process is the
    foreground job; else None."""
    terminal = UserTerminal()
    whole = all(os.isatty(descriptor) for descriptor in (_STDIN, STDOUT, STDERR))
    return terminal if whole and terminal.is_foreground() else None


class UserTerminal:
    """The terminal of descriptors 0 to 2, and its original modes."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def fileno(self) -> int:
        """Return the descriptor to poll for keystrokes."""
        return _STDIN

    def keys(self) -> bytes:
        """Read what the user has typed; empty if the terminal is gone."""
        try:
            return os.read(_STDIN, _KEYS)
        except OSError:
            return b""

    def size(self) -> tuple[int, int]:
        """Return the number of rows and columns; 24 and 80 if they are not known."""
        try:
            size = os.get_terminal_size(_STDIN)
        except OSError:
            return 24, 80
        return size.lines, size.columns

    def is_foreground(self) -> bool:
        """Return whether this process is the terminal's foreground job.

        The kernel stops a background job that changes the terminal's modes.
        """
        return in_foreground(_STDIN)

    def enter_raw_mode(self) -> None:
        """Set modes in which the terminal interprets no key. Does nothing if the terminal is
        gone."""
        try:
            self._before = termios.tcgetattr(_STDIN)
            termios.tcsetattr(_STDIN, termios.TCSADRAIN, modes_that_pass_keys_on(self._before))
        except (termios.error, OSError):
            self._before = None

    def restore(self) -> None:
        """Restore the original modes, if they were changed."""
        if self._before is not None:
            with suppress(termios.error, OSError):  # the terminal is gone
                termios.tcsetattr(_STDIN, termios.TCSADRAIN, self._before)
            self._before = None


class Passthrough:
    """Sink for a worker that has the terminal."""

    def __init__(self, *, quiet: bool) -> None:
        self._writer = Writer(STDOUT)
        self._quiet = quiet

    def output(self, rank: int, stream: int, data: bytes, now: float) -> None:
        del rank, stream, now
        self._writer.put(data)

    def rank_ended(self, rank: int, now: float) -> None:
        """Do nothing: this sink holds no output."""

    def tick(self, now: float) -> float | None:
        del now
        return None

    def has_room(self) -> bool:
        return self._writer.has_room()

    def on_room(self, wake: Callable[[], None]) -> None:
        self._writer.on_room = wake

    def say(self, text: str, *, level: Literal["info", "warning", "error"] = "info") -> None:
        """Show a message of the launcher. Lines begin with a carriage return: the terminal may be
        raw."""
        if level == "info" and self._quiet:
            return
        self._writer.put(b"\r" + launcher_lines(text).replace(b"\n", b"\r\n") + b"\r\n", must=True)

    def event(self, record: Mapping[str, object]) -> None:
        """Do nothing: events are not shown."""

    def status(self, view: StatusView) -> None:
        """Do nothing: the screen belongs to the worker."""

    def suspend(self) -> None:
        """Do nothing: the screen belongs to the worker."""

    def resume(self) -> None:
        """Do nothing: the screen belongs to the worker."""

    def close(self, *, timeout_s: float | None, hurried: Callable[[], bool] = lambda: False) -> int:
        """Write everything, within a limit. Return how many bytes could not be shown."""
        self._writer.begin_close()
        drops = timeout_s is not None
        timeout_s = TERMINAL_CLOSE_S if timeout_s is None else min(timeout_s, TERMINAL_CLOSE_S)
        return self._writer.finish_close(timeout_s, drops=drops, hurried=hurried)
