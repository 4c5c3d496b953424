"""Who does the work that may wait for a disk: the main loop itself, or a thread beside it.

Where nodes are reached by links, a loop that stands still for a few seconds loses them all: no ping is answered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Desk:
    """Does everything at once, as on one machine, where nobody waits for the loop."""

    def do(self, work: Callable[[], object]) -> None:
        """Do this, after what was handed over before; its OSErrors are its own affair."""
        work()

    def ask(self, work: Callable[[], T]) -> T | None:
        """Do this as well, and give what it gives; None if that takes longer than the loop may wait."""
        return work()
