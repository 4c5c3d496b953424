"""How far the warm server is, and when it has been silent for too long. Pure."""

from __future__ import annotations

from typing import Literal

from distlaunch.core.model.never import assert_never
from distlaunch.core.protocol import spawner_messages as w

ANSWER_S = 10.0
"""How long the server may take to fork a worker before it counts as stuck and its orders are carried out cold."""
FIRST_WORD_S = 60.0
"""How long its interpreter (behind ``--setup``'s shell, maybe) may take to come to our code, if it ever does."""
NOTE_S = 15.0
"""After so long it is told what is still being imported; again after twice that, and so on."""

Phase = Literal["starting", "importing", "checking", "ready"]


class ServerPhase:
    """What the server does since when; all times are of one clock."""

    def __init__(self, *, now: float, bound_s: float | None) -> None:
        """``bound_s``: how long the import of one module may take."""
        self.name: Phase = "starting"
        self.importing = ""
        self._bound_s = bound_s
        self._began = self._heard = now
        self._note_at = now + NOTE_S

    def heard(self, now: float) -> None:
        """Take note of a word of the server, or of a moment from which on it is to be waited for."""
        self._heard = now

    def deadline(self, *, has_orders: bool) -> float | None:
        """Give when ``late`` or ``note`` will have something to say."""
        due = self._due(has_orders=has_orders)
        if self.name in ("checking", "ready"):
            return due
        return self._note_at if due is None else min(due, self._note_at)

    def _due(self, *, has_orders: bool) -> float | None:
        match self.name:
            case "starting":
                return self._heard + FIRST_WORD_S
            case "importing":
                return None if self._bound_s is None else self._heard + self._bound_s
            case "checking":
                return self._heard + ANSWER_S
            case "ready":
                return self._heard + ANSWER_S if has_orders else None
        assert_never(self.name)

    def late(self, now: float, *, has_orders: bool) -> str | None:
        """Tell why it is not to be waited for any longer, if so."""
        due = self._due(has_orders=has_orders)
        if due is None or now < due:
            return None
        match self.name:
            case "starting":
                return f"after {now - self._heard:.0f} s the workers' interpreter has not begun to import"
            case "importing":
                return f"importing {self.importing} did not end within {now - self._heard:.1f} s"
            case "checking":
                return "a trial fork after the imports does not end"
            case "ready":
                return f"{self.who} does not answer"
        assert_never(self.name)

    def note(self, now: float) -> w.StillPreloading | None:
        """Tell what takes long, if it does and was not told lately."""
        if self.name in ("checking", "ready") or now < self._note_at:
            return None
        elapsed_s = now - self._began
        self._note_at = now + elapsed_s
        return w.StillPreloading(module=self.importing, elapsed_s=elapsed_s)

    @property
    def who(self) -> str:
        """Say who the server is, for a sentence of why it is given up."""
        match self.name:
            case "starting":
                return "the process that was to import the modules"
            case "importing":
                return f"the process that was importing {self.importing}"
            case "checking" | "ready":
                return "the process that workers are forked from"
        assert_never(self.name)
