"""Layer toolkit: the signals that ask for a checkpoint. TERM: save and end; USR1: save and go on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | None


class Requests:
    """What has been asked of this worker. A handler of the script's own, set before, is called as well."""

    def __init__(self) -> None:
        self.save = False
        self.stop = False
        self._before: dict[int, Handler] = {}
        self._owner = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            return  # Python lets only the main thread set handlers
        for number in (signal.SIGTERM, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._heard)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a forked child: a pool ends its own by TERM
            signal.signal(number, self._before[number] or signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif number == signal.SIGTERM:
            self.stop = True
        else:
            self.save = True
        if os.getpid() == self._owner and callable(handler := self._before[number]):
            handler(number, frame)

    def end(self) -> None:
        """Give the signals back, unless the script has set handlers of its own meanwhile."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._heard:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
