"""What others do wrong again and again, on an open port mostly: said once a kind, then counted."""

from __future__ import annotations

from collections.abc import Callable

EVERY_S = 60.0


class Troubles:
    """``log`` gets a line for the first of each kind, then one a minute with how many more there were."""

    def __init__(self, log: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._log = log
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}

    def note(self, kind: str, line: str) -> None:
        """Take one in. ``kind`` is of a small set."""
        known = self._kinds.get(kind)
        if known is None:
            self._kinds[kind] = _Kind(self._clock())
            self._log(line)
        else:
            known.more += 1
            known.last = line

    def deadline(self) -> float | None:
        """Give when ``tick`` has something to say."""
        return min((kind.since + EVERY_S for kind in self._kinds.values() if kind.more), default=None)

    def tick(self) -> None:
        """Say what has been counted for long enough."""
        now = self._clock()
        for kind in self._kinds.values():
            if kind.more and now >= kind.since + EVERY_S:
                self._log(kind.last if kind.more == 1 else f"{kind.more:,} more like it, the last: {kind.last}")
                kind.since, kind.more = now, 0


class _Kind:
    """One kind of trouble: how many since it was last said."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.more = 0
        self.last = ""
