"""The signals that ask for a checkpoint. TERM: save and end; USR1: save and go on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | None


class _Heard:
    """What this process has been asked. A handler of the script's own, set before, is called as
    well."""

    def __init__(self) -> None:
        self.saves = 0
        self.stop = self.answered = False
        self.open: list[Requests] = []
        self._before: dict[int, Handler] = {}
        self._hearing = False
        self._owner = os.getpid()

    def begin(self) -> None:
        """Set the handlers. Those of an earlier Checkpoint may still be called by a script's
        own."""
        self._owner, self.stop, self.answered = os.getpid(), False, False
        if (
            threading.current_thread() is threading.main_thread()
        ):  # Python lets only that one set handlers
            for number in (signal.SIGTERM, signal.SIGUSR1):
                if (before := signal.signal(number, self.hear)) != self.hear:
                    self._before[number] = before

    def hear(self, number: int, frame: FrameType | None) -> None:
        if self._hearing:  # the script's handler, set between two Checkpoints, calls ours
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
            signal.signal(number, signal.SIG_DFL)  # a forked child: a pool ends its own by TERM
            os.kill(os.getpid(), number)
        if callable(before):
            before(number, frame)

    def end(self) -> None:
        """Give the signals back, unless the script has set handlers of its own meanwhile."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self.hear:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


_heard = _Heard()
"""One for all Checkpoints of a process: they may end in any order."""


class Requests:
    """What has been asked of one Checkpoint."""

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
        """Whether TERM has come."""
        return _heard.stop

    def saved(self) -> None:
        """Say that all has been done that was asked by USR1."""
        self._served = _heard.saves

    def may_stop(self) -> bool:
        """Tell, after a save for TERM, whether to end now: others that take steps get to their next
        one first."""
        waits = any(each.stepped and not each._stopping for each in _heard.open if each is not self)  # noqa: SLF001
        again, self._stopping = self._stopping, True
        return again or not waits

    def answered(self) -> None:
        """Say that Stopped is raised."""
        _heard.answered = True

    def end(self) -> bool:
        """Hear no more; the last one gives the signals back, and tells whether TERM has come and is
        not answered."""
        if self not in _heard.open:
            return False
        _heard.open.remove(self)
        if _heard.open:
            return False
        _heard.end()
        return _heard.stop and not _heard.answered
