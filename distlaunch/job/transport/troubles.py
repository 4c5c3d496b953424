"""Layer job.transport: what goes wrong on an open port again and again, said once a kind, then counted."""

from __future__ import annotations

from collections.abc import Callable

EVERY_S = 60.0


class Troubles:
    """``log`` gets a line for the first of each kind, then one a minute with how many more there were."""

    def __init__(self, port: int, log: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._port = port
        self._log = log
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}

    def note(self, kind: str, address: str, text: str) -> None:
        """Take one in; ``text`` is a clause. ``kind`` is of a small set."""
        known = self._kinds.get(kind)
        if known is None:
            self._kinds[kind] = _Kind(self._clock())
            self._log(f"a connection from {address} to port {self._port} was closed: {text}")
        else:
            known.more += 1
            known.last = f"{text} (the last was from {address})"

    def deadline(self) -> float | None:
        """Give when ``tick`` has something to say."""
        return min((kind.since + EVERY_S for kind in self._kinds.values() if kind.more), default=None)

    def tick(self) -> None:
        """Say what has been counted for long enough."""
        now = self._clock()
        for kind in self._kinds.values():
            if kind.more and now >= kind.since + EVERY_S:
                plural = "connections were" if kind.more > 1 else "connection was"
                self._log(f"{kind.more:,} more {plural} closed on port {self._port}: {kind.last}")
                kind.since, kind.more = now, 0


class _Kind:
    """One kind of trouble: how many since it was last said."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.more = 0
        self.last = ""
