"""The pseudo-terminal of a job's only worker, and the modes of the user's terminal."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import termios
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from distlaunch.core.agent.workers import process_tree

_TYPED_BYTES = 4 << 20
_WRITE_BYTES = 4096
_LOCAL, _SPECIAL = 3, 6  # places in termios attributes


def in_foreground(terminal: int) -> bool:
    """Return whether this process belongs to the terminal's foreground job, which receives typed
    input."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False


def modes_that_pass_keys_on(modes: list[Any]) -> list[Any]:
    """Return terminal modes in which every key is passed on and none is interpreted."""
    iflag, oflag, cflag, lflag, ispeed, ospeed, special = modes
    iflag &= ~(termios.BRKINT | termios.ICRNL | termios.INPCK | termios.ISTRIP | termios.IXON)
    lflag &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN | termios.ISIG)
    special = list(special)
    special[termios.VMIN], special[termios.VTIME] = 1, 0
    return [iflag, oflag & ~termios.OPOST, cflag, lflag, ispeed, ospeed, special]


class SavedTerminal:
    """The user's terminal with its current modes, for a process that restores them.

    Raises OSError if the descriptor cannot be copied, and termios.error if it is no terminal.
    """

    def __init__(self, descriptor: int) -> None:
        self._before = termios.tcgetattr(descriptor)
        self.descriptor = os.dup(descriptor)

    def restore(self) -> None:
        """Restore the modes, unless another program (a shell) has changed them, and close the
        terminal."""
        with suppress(termios.error, OSError):  # the terminal is gone
            if termios.tcgetattr(self.descriptor) == modes_that_pass_keys_on(self._before):
                termios.tcsetattr(self.descriptor, termios.TCSANOW, self._before)
        with suppress(OSError):
            os.close(self.descriptor)


class PseudoTerminal:
    """The pseudo-terminal of one attempt.

    The caller closes ``output`` and ``worker_ends``. Raises OSError if the system has no terminal
    or descriptor left.
    """

    def __init__(self, rows: int, columns: int) -> None:
        opened = list(os.openpty())
        try:
            opened += [os.dup(opened[0]), os.dup(opened[1]), os.dup(opened[1])]
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            raise
        self.output, slave, self._ours, *others = opened
        os.set_blocking(self._ours, False)
        self._typed = bytearray()
        self.worker_ends = (slave, others[0], others[1])
        self.resize(rows, columns)

    def resize(self, rows: int, columns: int) -> None:
        """Set the size to the size of the user's terminal."""
        if rows and columns:
            with suppress(OSError):
                fcntl.ioctl(
                    self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0)
                )

    def type(self, data: bytes) -> None:
        """Send keys to the worker. Up to 4 MiB (a pasted block) wait until the worker reads
        them."""
        self._typed += data[: _TYPED_BYTES - len(self._typed)]
        self.flush()

    def flush(self) -> None:
        """Send as many waiting keys as possible."""
        with suppress(OSError):
            while self._typed:
                del self._typed[: os.write(self._ours, self._typed[:_WRITE_BYTES])]

    @property
    def has_unsent(self) -> bool:
        """Whether keys wait to be sent."""
        return bool(self._typed)

    def fileno(self) -> int:
        """Return the descriptor to poll for writing while keys wait."""
        return self._ours

    def is_unhandled_halt(self, data: bytes, pids: Iterable[int]) -> bool:
        """Return whether these keys contain a Ctrl-Z that would have no effect.

        The worker leads its session, so its process group is orphaned: SIGTSTP stops no process of
        it by default (POSIX). A worker that catches SIGTSTP, or has disabled signals from keys,
        handles Ctrl-Z itself.
        """
        try:
            modes = termios.tcgetattr(self._ours)
        except (termios.error, OSError):
            return False
        key = modes[_SPECIAL][termios.VSUSP]
        typed = bool(modes[_LOCAL] & termios.ISIG) and key != b"\0" and key in data
        return typed and not any(process_tree.catches(pid, signal.SIGTSTP) for pid in pids)

    def close(self) -> None:
        """Close this process's end."""
        os.close(self._ours)
