"""Write the launcher's signals as bytes to a pipe, which the main loop reads."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

from distlaunch.coordinator.policy.signals import StopSignal, StopSignalCounter

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
LOOK_S = 0.1
"""Period at which waiting code checks for a signal after the job's end."""
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
FOR_THE_JOB = frozenset((*ENDING, *_PASSED_ON))
"""Signals that are meant for the job, whether this launcher, another launcher, or an agent of a
scheduler's step receives them."""
_NEVER_IGNORED = frozenset((signal.SIGCONT, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT))
"""Signals that are handled even if they were ignored when the launcher started. ``SignalPipe``
describes an exception."""
_OWN = (signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)


def _noted(signum: int, frame: FrameType | None) -> None:
    """Do nothing: Python has already written the signal's number to the pipe."""


class SignalPipe:
    """The signals that this process receives, in order.

    HUP, and signals of stop keys such as Ctrl-Z, remain ignored if they were ignored when the
    launcher started. INT and QUIT remain ignored only if HUP was ignored as well (``nohup
    distlaunch ... &`` in a script). A plain ``&`` in a script also makes the shell ignore INT and
    QUIT, but not on the user's request, and the script may send INT on purpose. TERM is never
    ignored.

    The handlers remain after the job's end. A signal then only makes ``is_hurried`` return True.
    """

    def __init__(self) -> None:
        """Install the signal handlers, and unblock the signals."""
        self._requests = StopSignalCounter()
        self._hurried = False
        self._read, self._write = os.pipe()
        for descriptor in (self._read, self._write):
            os.set_blocking(descriptor, False)
        self._taken: set[int] = set()
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, (*ENDING, *_PASSED_ON, *_OWN)
        )  # the parent process may have blocked them
        ignored = {number for number in ENDING if signal.getsignal(number) == signal.SIG_IGN}
        left_ignored = ignored if {signal.SIGINT, signal.SIGHUP} <= ignored else {signal.SIGHUP}
        never_ignored = _NEVER_IGNORED - left_ignored | {signal.SIGTERM}
        # before the handlers, which do nothing: no signal may come between
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (
            *ENDING,
            *_PASSED_ON,
            *_OWN,
            signal.SIGCHLD,
        ):  # SIGCHLD wakes the loop: to reap, or to see a stop
            if signal.getsignal(number) != signal.SIG_IGN or number in never_ignored:
                self._taken.add(number)
                signal.signal(number, _noted)

    def fileno(self) -> int:
        """Return the descriptor to poll for reading."""
        return self._read

    def read(self) -> bytes:
        """Return the numbers of the signals received since the last call, oldest first; ``b""`` if
        none were received."""
        try:
            numbers = os.read(self._read, 4096)
        except BlockingIOError:
            return b""
        for number in numbers:
            if number in ENDING:
                self._requests.classify(time.monotonic())
        return numbers

    def is_hurried(self) -> bool:
        """Read signals. Return whether one has asked the launcher to exit without further waiting,
        now or before.

        Called when the job's exit code is known. A signal then no longer stops the job; it only
        shortens the waiting. A repetition of the signal that stopped the job does not count
        (``StopSignalCounter``).
        """
        try:
            numbers = b"" if self._hurried else os.read(self._read, 4096)
        except BlockingIOError:
            return False
        for number in numbers:
            if number in ENDING:
                counts = self._requests.classify(time.monotonic()) in (
                    StopSignal.FIRST,
                    StopSignal.AGAIN,
                )
                self._hurried = self._hurried or counts or number == signal.SIGQUIT
        return self._hurried

    def ignores(self, signum: int) -> bool:
        """Return whether a signal was ignored when the launcher started, and remains ignored."""
        return signum not in self._taken


def stop_self() -> None:
    """Suspend this process, with the default action of Ctrl-Z, until it is continued.

    The kernel ignores the signal if no shell could continue the process.
    """
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)
