"""Live rows: progress bars that are redrawn in place at the bottom of a terminal.

One rank owns them. The lowest shown rank may become the owner at any time, another rank if there is
no owner, or its bars have not moved for OWNER_S. Lines of all ranks appear above. Bars of other
ranks are shown as lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from distlaunch.console.prefixes import Prefixes
from distlaunch.console.terminal_writer import TerminalWriter

if TYPE_CHECKING:
    from distlaunch.console.live_display import Display

OWNER_S = 10.0
"""A rank whose bars have not moved for this long may lose the live rows."""
_FRAME_S = 0.05


class LiveRows:
    """The live rows' owner, and the times at which the rows are drawn.

    A dumb terminal cannot erase rows (``draws``), so no rank owns them.
    """

    def __init__(
        self, terminal: TerminalWriter, *, ranks: Iterable[int], prefixes: Prefixes, draws: bool
    ) -> None:
        self._terminal = terminal
        self._prefix = prefixes
        self._draws = draws
        self._lowest_rank = min(ranks, default=0)
        self._drawn_s = -_FRAME_S
        self.owner: int | None = None
        self.moved_s = 0.0
        self.due: float | None = None
        """When the rows are to be drawn; None if they are up to date."""

    def can_own(self, rank: int, now: float) -> bool:
        """Return whether a rank owns the live rows or may become their owner."""
        is_free = self.owner in (None, rank) or now >= self.moved_s + OWNER_S
        return self._draws and (is_free or rank == self._lowest_rank)

    def set_owner(self, rank: int, now: float) -> bool:
        """Make a rank the owner. Return whether the owner has changed."""
        is_new = self.owner != rank
        self.owner = rank
        self.moved_s = now
        return is_new

    def release(self) -> None:
        """Erase the rows, because their owner has no display any more."""
        self.owner = None
        self.due = None
        self._terminal.set_bars(())

    def draw_soon(self, displays: Sequence[Display], now: float) -> None:
        """Draw the owner's displays now, or at ``due`` if the last drawing was less than _FRAME_S
        ago."""
        if self._drawn_s + _FRAME_S <= now:
            self.draw(displays, now)
        elif self.due is None:
            self.due = self._drawn_s + _FRAME_S

    def draw(self, displays: Sequence[Display], now: float) -> None:
        """Draw the owner's displays now, each row with the rank's prefix."""
        self.due = None
        self._drawn_s = now
        rows: list[bytes] = []
        if self.owner is not None:
            prefix = self._prefix(self.owner)
            columns = self._terminal.columns - len(f"[{self.owner}] ")
            for display in displays:
                rows += [prefix + row for row in display.rows(columns)]
        self._terminal.set_bars(tuple(rows))
