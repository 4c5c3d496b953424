"""Blocks of lines that one rank has shown and others write again become one line with a count.

``equal_lines`` joins equal lines that come within 0.1 s of each other. Here lines of other ranks are
compared with what was shown in the last WINDOW_S. A line that no rank has shown is emitted at once.
Only a repetition is held: until it ends, until GAP_S after its last line that was found again, and
for at most WINDOW_S. Repetitions of one block by several ranks are gathered for GATHER_S. Each
rank's lines leave in the order in which they came.

Lines count as equal if ``alike`` says the same of them: they may differ in the rank that torch puts
in front, in the addresses of native frames, and, where they tell of a lost peer, in numbers such as
its port.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

Who = int | frozenset[int]
Emit = Callable[["int | frozenset[int]", "list[bytes]"], None]

WINDOW_S = 10.0
GAP_S = 0.3
GATHER_S = 1.0
_LEAST_LINES = 2
_MOST_LINES = 400
"""Of one call: more are a flood, which passes. Of one rank: more are not kept."""
_MOST_PLACES = 4
_MOST_TEXTS = 8192
_MOST_AHEAD = 32
"""Lines of a run that no other rank has shown yet. With more of them the run is no repetition."""
_MOST_BYTES = 256 << 10
"""Of the lines that a run holds, and of the lines kept for comparison of one rank."""
_LEAST_CHARS = 4
_MOST_CHARS = 4096
"""A repetition begins with a line of _LEAST_CHARS to _MOST_CHARS."""
_TRACEBACK = b"Traceback (most recent call last):"
_OF_PEERS = (b"peer", b"onnection", b"remote", b"pipe", b"shut")


def alike(line: bytes) -> bytes:
    """Return what must be equal in two lines that are shown once."""
    line = without_rank(line)
    if b"0x" in line and line.lstrip().startswith(b"frame #"):
        import re

        return re.sub(rb"0x[0-9a-f]+", b"0x", line)
    if any(word in line for word in _OF_PEERS) and _tells_of_lost_peer(line):
        return line.translate(None, b"0123456789")
    return line


def without_rank(line: bytes) -> bytes:
    """Return the line without the ``[rank3]: `` that torch puts in front."""
    if line.startswith(b"[rank"):
        number, end, rest = line[5:].partition(b"]:")
        if end and number.isdigit():
            return rest.removeprefix(b" ")
    return line


def _tells_of_lost_peer(line: bytes) -> bool:
    from distlaunch.diagnosis.consequence import Standing, standing_of_text

    return standing_of_text(line.decode("utf-8", "replace")) is Standing.LOST_PEER


class _Shown:
    """The lines that a rank, or a set of ranks with this one first, has shown lately."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.base = 0
        self.entries: deque[tuple[bytes, bytes, float]] = deque()
        """What must be equal of a line, the line, and when it was shown."""
        self._weight = 0

    @property
    def end(self) -> int:
        return self.base + len(self.entries)

    def at(self, place: int) -> tuple[bytes, bytes, float] | None:
        return self.entries[place - self.base] if place >= self.base else None

    def add(self, key: bytes, line: bytes, now: float) -> None:
        self.entries.append((key, line, now))
        self._weight += len(line)
        while self.entries and (
            len(self.entries) > _MOST_LINES
            or self._weight > _MOST_BYTES
            or self.entries[0][2] + WINDOW_S < now
        ):
            self._weight -= len(self.entries.popleft()[1])
            self.base += 1


class _Place:
    """Where a block may have been shown before, and how many of the lines have been found there."""

    __slots__ = ("exact", "found", "shown", "start")

    def __init__(self, shown: _Shown, start: int) -> None:
        self.shown = shown
        self.start = start
        self.found = 0
        self.exact = True

    def follow(self, keys: list[bytes], lines: list[bytes]) -> bool:
        """Compare what is there by now; return whether all that is there is equal."""
        while self.found < len(keys) and (place := self.start + self.found) < self.shown.end:
            entry = self.shown.at(place)
            if entry is None or entry[0] != keys[self.found]:
                return False
            self.exact = self.exact and entry[1] == lines[self.found]
            self.found += 1
        return True


class _Run:
    """Lines that are held because they may repeat a block."""

    def __init__(self, who: Who, places: list[_Place], came_s: float) -> None:
        self.who = who
        self.places = places
        self.best = places[0]
        self.keys: list[bytes] = []
        self.lines: list[bytes] = []
        self.came_s: list[float] = []
        """When each line came."""
        self.due = came_s + GAP_S
        """When the run ends unless one more of its lines is found before."""
        self._ends_s = came_s + WINDOW_S
        self._weight = 0

    def add(self, key: bytes, line: bytes, came_s: float) -> bool:
        """Take the next line; return whether the run goes on."""
        self.keys.append(key)
        self.lines.append(line)
        self.came_s.append(came_s)
        self._weight += len(line)
        found = self.best.found
        self.follow()
        if self.best.found > found:
            self.due = min(came_s + GAP_S, self._ends_s)
        is_full = len(self.lines) >= _MOST_LINES or self._weight > _MOST_BYTES
        return (
            bool(self.places) and not is_full and len(self.lines) - self.best.found <= _MOST_AHEAD
        )

    def follow(self) -> None:
        """Look for the lines that have not been found yet in what has been shown by now."""
        self.places = [place for place in self.places if self._follow(place)]

    def _follow(self, place: _Place) -> bool:
        equal = place.follow(self.keys, self.lines)
        if place.found > self.best.found:
            self.best = place
        return equal


class _Repetition:
    """A block that ranks have repeated, not told yet."""

    def __init__(self, of: int, lines: int, due: float) -> None:
        self.of = of
        self.lines = lines
        self.ranks: set[int] = set()
        self.exact = True
        self.due = due

    def told(self) -> bytes:
        count = len(self.ranks)
        ranks = f"{count} ranks " if count > 1 else ""
        numbers = "" if self.exact else " (numbers differ)"
        return f"... {ranks}repeated {self.lines} lines of rank {self.of} above{numbers}".encode()


class Repeats:
    """Stands between the folder and the screen."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._shown: dict[int, _Shown] = {}
        self._places: dict[bytes, deque[tuple[_Shown, int]]] = {}
        self._runs: dict[int, _Run] = {}
        self._repetitions: dict[tuple[int, int, int], _Repetition] = {}
        self._of_rank: dict[int, tuple[int, int, int]] = {}

    def add(self, who: Who, lines: list[bytes], now: float) -> None:
        """Take lines of a rank, or of several ranks that wrote the same."""
        if len(lines) > _MOST_LINES:
            self._end_runs(who, now)
            self._pass(who, lines)
            return
        for line in lines:
            self._add(who, line, now, now)

    def flush_due(self, now: float) -> float | None:
        """Show what has been held long enough; return when the next is due."""
        while run := next((run for run in self._runs.values() if run.due <= now), None):
            self._end_run(run, now)
        for key, repetition in list(self._repetitions.items()):
            if repetition.due <= now:
                self._tell(key)
        dues = [run.due for run in self._runs.values()]
        dues += [repetition.due for repetition in self._repetitions.values()]
        return min(dues, default=None)

    def release(self, rank: int, now: float) -> None:
        """Show all lines of this rank."""
        self._end_runs(rank, now)
        if (key := self._of_rank.get(rank)) is not None:
            self._tell(key)

    def flush(self, now: float) -> None:
        """Show everything."""
        while self._runs:
            self._end_run(next(iter(self._runs.values())), now)
        for key in list(self._repetitions):
            self._tell(key)

    # --- runs

    def _add(self, who: Who, line: bytes, came_s: float, now: float) -> None:
        """Take one line, which came now or is left of a run that has ended."""
        run = self._run_of(who, now)
        key = alike(line)
        if run is None and not _is_indented(line) and (places := self._find(who, key, now)):
            run = _Run(who, places, came_s)
            for rank in _ranks(who):
                self._runs[rank] = run
        if run is None:
            self._pass(who, [line])
            self._note(who, key, line, now)
        elif not run.add(key, line, came_s):
            self._end_run(run, now)

    def _run_of(self, who: Who, now: float) -> _Run | None:
        """Return the run that these lines continue; end those of the same ranks that they do
        not."""
        if not self._runs:
            return None
        run = self._runs.get(next(iter(_ranks(who))))
        if run is not None and run.who == who:
            return run
        self._end_runs(who, now)
        return None

    def _end_runs(self, who: Who, now: float) -> None:
        while (
            self._runs
            and (rank := next((rank for rank in _ranks(who) if rank in self._runs), None))
            is not None
        ):
            self._end_run(self._runs[rank], now)

    def _end_run(self, run: _Run, now: float) -> None:
        """Note what of a run is a repetition, and show the rest of it."""
        for rank in _ranks(run.who):
            self._runs.pop(rank, None)
        run.follow()
        count = run.best.found
        whole = count >= _LEAST_LINES and not _is_cut(run.lines, count)
        if whole:
            self._repeated(run, count, now)
        else:
            count = max(1, count)
            self._pass(run.who, run.lines[:count])
            for key, line in zip(run.keys[:count], run.lines, strict=False):
                self._note(run.who, key, line, now)
        for line, came_s in zip(run.lines[count:], run.came_s[count:], strict=True):
            self._add(run.who, line, came_s, now)

    def _repeated(self, run: _Run, count: int, now: float) -> None:
        best = run.best
        key = (best.shown.rank, best.start, count)
        ranks = _ranks(run.who)
        for rank in ranks:
            if (other := self._of_rank.get(rank)) is not None and (
                other != key or rank in self._repetitions[key].ranks
            ):
                self._tell(other)
        repetition = self._repetitions.get(key)
        if repetition is None:
            repetition = self._repetitions[key] = _Repetition(
                best.shown.rank, count, now + GATHER_S
            )
        repetition.ranks.update(ranks)
        repetition.exact = repetition.exact and best.exact
        self._of_rank.update(dict.fromkeys(ranks, key))

    def _tell(self, key: tuple[int, int, int]) -> None:
        repetition = self._repetitions.pop(key)
        for rank in repetition.ranks:
            del self._of_rank[rank]
        ranks = repetition.ranks
        self._emit(next(iter(ranks)) if len(ranks) == 1 else frozenset(ranks), [repetition.told()])

    # --- what was shown

    def _pass(self, who: Who, lines: list[bytes]) -> None:
        if self._of_rank:
            for rank in _ranks(who):
                if (key := self._of_rank.get(rank)) is not None:
                    self._tell(key)
        self._emit(who, lines)

    def _note(self, who: Who, key: bytes, line: bytes, now: float) -> None:
        rank = who if isinstance(who, int) else min(who)
        shown = self._shown.get(rank)
        if shown is None:
            shown = self._shown[rank] = _Shown(rank)
        if len(key) <= _MOST_CHARS and len(key.strip()) >= _LEAST_CHARS:
            if len(self._places) > _MOST_TEXTS:
                self._places.clear()
            self._places.setdefault(key, deque(maxlen=_MOST_PLACES)).append((shown, shown.end))
        shown.add(key, line, now)

    def _find(self, who: Who, key: bytes, now: float) -> list[_Place]:
        """Return where other ranks have lately shown such a line, the latest first."""
        known = self._places.get(key)
        if known is None:
            return []
        ranks = _ranks(who)
        places = []
        for shown, start in islice(reversed(known), _MOST_PLACES):
            entry = shown.at(start)
            if entry is not None and entry[2] + WINDOW_S >= now and shown.rank not in ranks:
                places.append(_Place(shown, start))
        return places


def _is_indented(line: bytes) -> bool:
    return without_rank(line)[:1] in (b" ", b"\t")


def _is_cut(lines: list[bytes], count: int) -> bool:
    """Return whether the first ``count`` lines end within a traceback, or within another indented
    block."""
    if count < len(lines) and _is_indented(lines[count]):
        return True
    for line in reversed(lines[:count]):
        if not _is_indented(line):
            return _TRACEBACK in line
    return False


def _ranks(who: Who) -> frozenset[int] | tuple[int]:
    return (who,) if isinstance(who, int) else who
