"""Signals that ask for a checkpoint. SIGTERM: save and end. SIGUSR1: save and continue."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | None


class _Heard:
    """The signals that this process has received. A handler that the script has set before is
    called as well."""

    def __init__(self) -> None:
        self.saves = 0
        self.stop = self.answered = False
        self.open: list[Requests] = []
        self._before: dict[int, Handler] = {}
        self._hearing = False
        self._owner = os.getpid()

    def begin(self) -> None:
        """Set the signal handlers. Handlers of an earlier Checkpoint may remain in use, called by
        handlers of the script."""
        self._owner, self.stop, self.answered = os.getpid(), False, False
        # Only the main thread can set signal handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1):
                if (before := signal.signal(number, self.hear)) != self.hear:
                    self._before[number] = before

    def hear(self, number: int, frame: FrameType | None) -> None:
        if self._hearing:  # the script's handler has called this one
            return
        self._hearing = True
        try:
            self._take(number, frame)
        finally:
            self._hearing = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number, signal.SIG_DFL)
        if self.open and os.getpid() == self._owner:
            if number == signal.SIGTERM:
                self.stop = True
            else:
                self.saves += 1
        elif before == signal.SIG_DFL and signal.getsignal(number) == self.hear:
            signal.signal(number, signal.SIG_DFL)  # a forked child, which a pool ends with TERM
            os.kill(os.getpid(), number)
        if callable(before):
            before(number, frame)

    def end(self) -> None:
        """Restore the previous signal handlers, unless the script has set other handlers
        meanwhile."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self.hear:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


_heard = _Heard()
"""Shared by all Checkpoints of the process, which may be closed in any order."""


class Requests:
    """The requests of signals to one Checkpoint."""

    def __init__(self) -> None:
        self.stepped = self._stopping = False
        if not _heard.open:
            _heard.begin()
        _heard.open.append(self)
        self._served = _heard.saves

    @property
    def save(self) -> bool:
        """Whether a checkpoint is requested: SIGUSR1 has arrived since the last save."""
        return _heard.saves > self._served

    @property
    def stop(self) -> bool:
        """Whether SIGTERM has arrived."""
        return _heard.stop

    def saved(self) -> None:
        """Record that the save requested by SIGUSR1 is done."""
        self._served = _heard.saves

    def may_stop(self) -> bool:
        """Return whether to end now, after the save for SIGTERM.

        Other Checkpoints of the process may have steps left; they reach their next step first.
        """
        waits = any(each.stepped and not each._stopping for each in _heard.open if each is not self)  # noqa: SLF001
        again, self._stopping = self._stopping, True
        return again or not waits

    def answered(self) -> None:
        """Record that Stopped is raised, so that SIGTERM is handled."""
        _heard.answered = True

    def end(self) -> bool:
        """Stop receiving signals. The last Checkpoint restores the handlers.

        Return whether it is the last one and SIGTERM has arrived and was not handled.
        """
        if self not in _heard.open:
            return False
        _heard.open.remove(self)
        if _heard.open:
            return False
        _heard.end()
        return _heard.stop and not _heard.answered
