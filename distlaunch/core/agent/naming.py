"""The addresses that the name of a launcher stands for, looked up again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from distlaunch.core.probe.lookup import Address, addresses, look_up

FRESH_S = 2.0
"""Addresses are used for so long before they are looked up again."""
_LATER_S = 0.25


class Names:
    """The addresses that a name stands for. No lookup can be interrupted: one hangs at most, in a thread of its own.

    ``otherwise`` gives other names or addresses of the host if nobody knows the name; it is called in that thread.
    """

    def __init__(self, host: str, otherwise: Callable[[], Sequence[str]] | None = None) -> None:
        self.known: list[Address] = []
        self.problem = "its name has not been resolved yet"
        self.settled = threading.Event()
        """No lookup is under way."""
        self.settled.set()
        self._host = host
        self._otherwise = otherwise
        self._until = 0.0
        self._numeric = False

    def refresh(self) -> None:
        """Look the name up if what is known is no longer fresh."""
        if self._numeric or not self.settled.is_set() or time.monotonic() < self._until:
            return
        try:
            self.known = addresses(self._host, 0, numeric=True)
        except (OSError, UnicodeError):
            pass  # a name, as a rule
        else:
            self._numeric = True
            return
        self.settled.clear()
        try:
            look_up(self._host, 0, self._take, otherwise=self._otherwise)
        except RuntimeError:
            self.problem = "its name cannot be looked up: no thread can be started"
            self.settled.set()

    def _take(self, found: list[Address] | OSError | UnicodeError) -> None:
        if isinstance(found, list):
            self.known = found
        else:
            self.known = []
            why = (found.strerror if isinstance(found, OSError) else None) or found
            self.problem = f"its name cannot be resolved: {why}"
        self._until = time.monotonic() + (FRESH_S if self.known else _LATER_S)
        self.settled.set()


class Several:
    """Several names of one host, any of which may lead to it; used as ``Names`` are."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._each = [Names(host) for host in hosts]
        self._nothing_to_wait_for = threading.Event()
        self._nothing_to_wait_for.set()

    @property
    def known(self) -> list[Address]:
        """All addresses that are known."""
        return list(dict.fromkeys(address for one in self._each for address in one.known))

    @property
    def problem(self) -> str:
        """Why none is known."""
        return self._each[-1].problem

    @property
    def settled(self) -> threading.Event:
        """What is set once an address is known, or no lookup is under way."""
        awaited = [] if self.known else [one.settled for one in self._each if not one.settled.is_set()]
        return awaited[0] if awaited else self._nothing_to_wait_for

    def refresh(self) -> None:
        """Look up what is no longer fresh."""
        for one in self._each:
            one.refresh()
