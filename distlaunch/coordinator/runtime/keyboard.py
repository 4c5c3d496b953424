"""Pass keystrokes to the only worker, if it uses the user's terminal through a
pseudo-terminal."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.core.protocol import agent_messages as m

INTERRUPTS_KILL = 3
INTERRUPTS_S = 1.5
"""With a pseudo-terminal, Ctrl-C is sent to the worker. If it is typed INTERRUPTS_KILL times within
this time, the worker is killed."""
_INTERRUPT = b"\x03"


class Terminal(Protocol):
    """The user's terminal, while the worker uses it through a pseudo-terminal."""

    def fileno(self) -> int:
        """Return the descriptor to poll for keystrokes."""

    def keys(self) -> bytes:
        """Return the bytes that the user has typed."""

    def size(self) -> tuple[int, int]:
        """Return the number of rows and columns."""

    def is_foreground(self) -> bool:
        """Return whether this launcher is the terminal's foreground job."""

    def enter_raw_mode(self) -> None:
        """Switch the terminal to modes that pass on every key."""

    def restore(self) -> None:
        """Restore the terminal's modes."""


class Keyboard:
    """Passes keystrokes on, if the launcher has a terminal."""

    def __init__(
        self, terminal: Terminal | None, send: Callable[[m.Input | m.Resize], None]
    ) -> None:
        self._terminal = terminal
        self._send = send
        self._is_raw = False
        self._interrupts: deque[float] = deque(maxlen=INTERRUPTS_KILL)

    @property
    def has_terminal(self) -> bool:
        """Whether the only worker runs on a pseudo terminal."""
        return self._terminal is not None

    def size(self) -> tuple[int, int] | None:
        """Return the number of rows and columns; None without a terminal."""
        return None if self._terminal is None else self._terminal.size()

    def fileno(self) -> int:
        """Return the descriptor to poll; -1 if keys are not read."""
        return self._terminal.fileno() if self._is_raw and self._terminal is not None else -1

    def start(self) -> None:
        """Switch the terminal to raw mode and read keys, if this launcher is the terminal's
        foreground job.

        The kernel would stop a background process that changes the modes of the terminal.
        """
        if self._terminal is not None and not self._is_raw and self._terminal.is_foreground():
            self._terminal.enter_raw_mode()
            self._is_raw = True
            self.resize()

    def resize(self) -> None:
        """Send the size of the terminal to the worker, if keys are being read."""
        if self._terminal is not None and self._is_raw:
            rows, columns = self._terminal.size()
            self._send(m.Resize(rows=rows, columns=columns))

    def stop(self) -> None:
        """Read no more keys, and restore the terminal for the shell."""
        if self._terminal is not None and self._is_raw:
            self._terminal.restore()
            self._is_raw = False

    def read(self, *, has_reader: bool) -> a.Signalled | None:
        """Send the typed keys to the worker. Return a signal for the launcher, if the keys stand
        for one.

        That is INT for Ctrl-C if ``has_reader`` is False, INT with ``kill`` for repeated Ctrl-C,
        and HUP if the terminal has gone away. ``has_reader``: a worker runs that can read the keys.
        """
        if self._terminal is None:
            return None
        data = self._terminal.keys()
        if not data:  # the terminal has gone away
            self._terminal, self._is_raw = None, False
            return a.Signalled(signum=signal.SIGHUP)
        if not has_reader and _INTERRUPT in data:
            return a.Signalled(signum=signal.SIGINT)
        self._send(m.Input(data=data))
        now = time.monotonic()
        self._interrupts.extend([now] * data.count(_INTERRUPT))
        if len(self._interrupts) == INTERRUPTS_KILL and now - self._interrupts[0] < INTERRUPTS_S:
            self._interrupts.clear()
            return a.Signalled(signum=signal.SIGINT, kill=True)
        return None
