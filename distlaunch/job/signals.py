"""Layer job: the launcher's own signals, turned into bytes on a pipe that the loop reads."""

from __future__ import annotations

import os
import signal
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
FOR_THE_JOB = frozenset((*ENDING, *_PASSED_ON))
"""What counts wherever it comes: here, to another launcher, to an agent of a scheduler's step."""
_NEVER_IGNORED = (signal.SIGCONT, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
_OWN = (signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)


def _noted(signum: int, frame: FrameType | None) -> None:
    """Do nothing: the wakeup descriptor has the number."""


class SignalPipe:
    """Signals as they come. HUP and what stops by keys stay ignored if we were started so (nohup).

    INT does not: a script that starts us with ``&`` has it ignored unasked, and may well send it on purpose.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        for descriptor in (self._read, self._write):
            os.set_blocking(descriptor, False)
        self._before: dict[int, object] = {}
        self._mask = signal.pthread_sigmask(
            signal.SIG_UNBLOCK, (*ENDING, *_PASSED_ON, *_OWN)
        )  # as a bad parent left it
        for number in (*ENDING, *_PASSED_ON, *_OWN, signal.SIGCHLD):  # the last wakes us: to reap, or to see a stop
            before = signal.getsignal(number)
            if before != signal.SIG_IGN or number in _NEVER_IGNORED:
                self._before[number] = before
                signal.signal(number, _noted)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def fileno(self) -> int:
        """Give the descriptor to poll for reading."""
        return self._read

    def read(self) -> bytes:
        """Give the numbers of the signals that have come since, in order."""
        try:
            return os.read(self._read, 4096)
        except BlockingIOError:
            return b""

    def ignores(self, signum: int) -> bool:
        """Tell whether we were started with a signal ignored, and leave it so."""
        return signum not in self._before

    def close(self) -> list[int]:
        """Give every signal back to whom it belonged; give those to end that have come and that nobody has read."""
        signal.set_wakeup_fd(self._wakeup_before)
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]  # what getsignal gave
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        late = [number for number in self.read() if number in ENDING]
        os.close(self._read)
        os.close(self._write)
        return late


def stop_self() -> None:
    """Stop this process until it is continued; like Ctrl-Z by default, not where no shell could continue it."""
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)
