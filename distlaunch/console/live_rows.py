"""The live rows of a terminal: bars that move in place, at the bottom of the screen.

One rank at a time owns them: the lowest rank that is shown whenever it has a bar, else the first
that has one, until its bars have not moved for OWNER_S. Lines of all ranks go above these rows. The
bars of the other ranks are shown as lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from distlaunch.console.prefixes import Prefixes
from distlaunch.console.terminal_writer import TerminalWriter

if TYPE_CHECKING:
    from distlaunch.console.live_display import Display

OWNER_S = 10.0
"""A rank whose bars have not moved for so long may lose the live rows to another."""
_FRAME_S = 0.05
"""Live rows are drawn at most this often."""


class LiveRows:
    """Who owns the live rows, and when they are drawn.

    ``draws``: the terminal can erase. A dumb one cannot: no rank ever owns its live rows.
    """

    def __init__(
        self, terminal: TerminalWriter, *, ranks: Iterable[int], prefixes: Prefixes, draws: bool
    ) -> None:
        self._terminal = terminal
        self._prefix = prefixes
        self._draws = draws
        self._lead = min(ranks, default=0)
        self._drawn_s = -_FRAME_S
        self.owner: int | None = None
        """The rank that has the live rows."""
        self.moved_s = 0.0
        """When a display of the owner last changed."""
        self.due: float | None = None
        """When the rows are to be drawn; None if they show what they should."""

    def may_own(self, rank: int, now: float) -> bool:
        """Return whether the live rows are this rank's, or it may have them."""
        is_free = self.owner in (None, rank) or now >= self.moved_s + OWNER_S
        return self._draws and (is_free or rank == self._lead)

    def take(self, rank: int, now: float) -> bool:
        """Make a rank the owner, whose display has changed; return whether it was not before."""
        is_new = self.owner != rank
        self.owner = rank
        self.moved_s = now
        return is_new

    def release(self) -> None:
        """Erase the rows: their owner has no display any more."""
        self.owner = None
        self.due = None
        self._terminal.set_bars(())

    def draw_soon(self, displays: Sequence[Display], now: float) -> None:
        """Draw the owner's displays now, or set ``due`` if they were drawn a moment ago."""
        if self._drawn_s + _FRAME_S <= now:
            self.draw(displays, now)
        elif self.due is None:
            self.due = self._drawn_s + _FRAME_S

    def draw(self, displays: Sequence[Display], now: float) -> None:
        """Draw the owner's displays."""
        self.due = None
        self._drawn_s = now
        rows: list[bytes] = []
        if self.owner is not None:
            prefix = self._prefix(self.owner)
            columns = self._terminal.columns - len(f"[{self.owner}] ")
            for display in displays:
                rows += [prefix + row for row in display.rows(columns)]
        self._terminal.set_bars(tuple(rows))
