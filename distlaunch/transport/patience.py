"""How long a main loop may be held up by asking how what it has lost has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_MOST_S = 0.1
"""In all, and again after that has come back at ``_RATE``: a thousand links may be lost at once."""
_RATE = 0.02
T = TypeVar("T")


class Patience:
    """What there is for all links of a process together; the main loop's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left_s = _MOST_S
        self._at = clock()

    def spend(self, wait: Callable[[float], T]) -> T:
        """Have something wait, for at most so many seconds as there are."""
        began = self._clock()
        self._left_s = min(_MOST_S, self._left_s + (began - self._at) * _RATE)
        result = wait(max(0.0, self._left_s))
        self._at = self._clock()
        self._left_s -= self._at - began
        return result


patience = Patience()
