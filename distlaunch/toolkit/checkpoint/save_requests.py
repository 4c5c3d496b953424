"""Signals that ask for a checkpoint. SIGTERM: save and end. SIGUSR1: save and continue."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | None


class _ReceivedSignals:
    """The signals that this process has received. A handler of the script is called as well."""

    def __init__(self) -> None:
        self.saves = 0
        self.stop = self.answered = False
        self.open: list[SaveRequests] = []
        self._before: dict[int, Handler] = {}
        self._is_handling = False
        self._owner = os.getpid()

    def begin(self) -> None:
        """Set the handlers. Those of an earlier Checkpoint may be called by handlers of the script."""
        self._owner, self.stop, self.answered = os.getpid(), False, False
        # Only the main thread can set signal handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1):
                if (before := signal.signal(number, self.on_signal)) != self.on_signal:
                    self._before[number] = before

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_handling:  # the script's handler has called this one
            return
        self._is_handling = True
        try:
            self._record(number, frame)
        finally:
            self._is_handling = False

    def _record(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number, signal.SIG_DFL)
        if self.open and os.getpid() == self._owner:
            if number == signal.SIGTERM:
                self.stop = True
            else:
                self.saves += 1
        elif before == signal.SIG_DFL and signal.getsignal(number) == self.on_signal:
            signal.signal(number, signal.SIG_DFL)  # a forked child, which a pool ends with TERM
            os.kill(os.getpid(), number)
        if callable(before):
            before(number, frame)

    def end(self) -> None:
        """Restore the previous handlers, unless the script has set others meanwhile."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self.on_signal:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


_received = _ReceivedSignals()
"""Shared by all Checkpoints of the process, which may be closed in any order."""


class SaveRequests:
    """Requests of signals to one Checkpoint."""

    def __init__(self) -> None:
        self.stepped = self._stopping = False
        if not _received.open:
            _received.begin()
        _received.open.append(self)
        self._served = _received.saves

    @property
    def save(self) -> bool:
        """Whether a checkpoint is requested: SIGUSR1 has arrived since the last save."""
        return _received.saves > self._served

    @property
    def stop(self) -> bool:
        """Whether SIGTERM has arrived."""
        return _received.stop

    def saved(self) -> None:
        """Record that the save requested by SIGUSR1 is done."""
        self._served = _received.saves

    def may_stop(self) -> bool:
        """Return whether to end now, after the save for SIGTERM.

        The first call returns False if other Checkpoints of the process must reach their next step
        first. Later calls return True.
        """
        others = [each for each in _received.open if each is not self]
        waits = any(each.stepped and not each._stopping for each in others)  # noqa: SLF001
        again, self._stopping = self._stopping, True
        return again or not waits

    def answered(self) -> None:
        """Record that Stopped is raised, which handles SIGTERM."""
        _received.answered = True

    def end(self) -> bool:
        """Stop receiving signals. Return whether this was the last Checkpoint, and SIGTERM was not
        handled."""
        if self not in _received.open:
            return False
        _received.open.remove(self)
        if _received.open:
            return False
        _received.end()
        return _received.stop and not _received.answered
