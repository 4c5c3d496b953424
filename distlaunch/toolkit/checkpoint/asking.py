"""When workers ask each other whether one of them has been told to save. Decides; asks nobody itself."""

from __future__ import annotations

ASK_S = 0.5
"""How often workers ask each other; each time costs one tiny all-reduce."""
MOST_STEPS = 1000
"""The most steps between two questions."""


class Asking:
    """All workers call it with the same steps and answers, so that all come to the same next question."""

    def __init__(self, now_s: float) -> None:
        self.restart(now_s)

    def restart(self, now_s: float) -> None:
        """Ask after the next step again: the training goes on somewhere else."""
        self._asked: int | None = None
        self._at_s = now_s
        self._next = 0

    def is_due(self, steps: int) -> bool:
        """Tell whether to ask after this step; also where the steps go back."""
        return steps >= self._next or (self._asked is not None and steps < self._asked)

    def step_us(self, steps: int, now_s: float) -> int:
        """Give how long a step takes here, which goes into the question; the slowest worker's is the answer."""
        return int((now_s - self._at_s) / self._since(steps) * 1e6)

    def answered(self, steps: int, now_s: float, step_us: int) -> None:
        """Choose the next question by the slowest worker's step, at most twice as far off as the last one was."""
        self._next = steps + max(1, min(MOST_STEPS, 2 * self._since(steps), int(ASK_S * 1e6 / max(1, step_us))))
        self._asked, self._at_s = steps, now_s

    def _since(self, steps: int) -> int:
        """Give the steps since the last question; before the first one lies a start, which tells nothing."""
        return steps - self._asked if self._asked is not None and self._asked < steps else 1
