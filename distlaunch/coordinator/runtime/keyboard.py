"""The user's terminal while one worker has it: keystrokes go to the worker, and some mean us."""

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
"""With a pseudo-terminal Ctrl-C is the worker's own; so many within so many seconds kill it."""
_INTERRUPT = b"\x03"


class Terminal(Protocol):
    """The user's terminal, while one worker has it through a pseudo-terminal."""

    def fileno(self) -> int:
        """Return the descriptor to poll for keystrokes."""

    def keys(self) -> bytes:
        """Read what was typed."""

    def size(self) -> tuple[int, int]:
        """Give rows and columns."""

    def is_ours(self) -> bool:
        """Return whether we are its foreground job."""

    def take(self) -> None:
        """Switch to passing every key on."""

    def give_back(self) -> None:
        """Restore the modes that it had."""


class Keyboard:
    """Passes keystrokes on; there may be no terminal."""

    def __init__(
        self, terminal: Terminal | None, send: Callable[[m.Input | m.Resize], None]
    ) -> None:
        self._terminal = terminal
        self._send = send
        self._is_taken = False
        self._interrupts: deque[float] = deque(maxlen=INTERRUPTS_KILL)

    @property
    def is_there(self) -> bool:
        """Return whether a worker is to have a terminal."""
        return self._terminal is not None

    def size(self) -> tuple[int, int] | None:
        """Give rows and columns of the terminal; None if there is none."""
        return None if self._terminal is None else self._terminal.size()

    def fileno(self) -> int:
        """Return what to poll; -1 if nothing."""
        return self._terminal.fileno() if self._is_taken and self._terminal is not None else -1

    def take(self) -> None:
        """Have the terminal (again) if we are its foreground job: after ``bg`` touching it would
        stop us."""
        if self._terminal is not None and not self._is_taken and self._terminal.is_ours():
            self._terminal.take()
            self._is_taken = True
            self.resize()

    def resize(self) -> None:
        """Tell the worker how large the terminal is."""
        if self._terminal is not None and self._is_taken:
            rows, columns = self._terminal.size()
            self._send(m.Resize(rows=rows, columns=columns))

    def give_back(self) -> None:
        """Leave the terminal to the shell for a while."""
        if self._terminal is not None and self._is_taken:
            self._terminal.give_back()
            self._is_taken = False

    def read(self, *, hears: bool) -> a.Signalled | None:
        """Pass on what was typed; give the signal that it stands for to us. ``hears``: a worker is
        there to have it."""
        if self._terminal is None:
            return None
        data = self._terminal.keys()
        if not data:  # the terminal has gone away
            self._terminal, self._is_taken = None, False
            return a.Signalled(signum=signal.SIGHUP)
        if not hears and _INTERRUPT in data:
            return a.Signalled(signum=signal.SIGINT)
        self._send(m.Input(data=data))
        now = time.monotonic()
        self._interrupts.extend([now] * data.count(_INTERRUPT))
        if len(self._interrupts) == INTERRUPTS_KILL and now - self._interrupts[0] < INTERRUPTS_S:
            self._interrupts.clear()
            return a.Signalled(signum=signal.SIGINT, kill=True)
        return None
