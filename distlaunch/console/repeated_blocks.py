"""Replace blocks of lines that other ranks have already shown by one line with a count.

``equal_lines`` joins equal lines within 0.1 s; this module compares with those of the last
WINDOW_S. Lines that may repeat a block are a candidate. They are held until a line differs, until
GAP_S after the last line that matched, and for at most WINDOW_S. Repetitions of one block are
counted for GATHER_S and then reported. The lines of each rank remain in order.

``comparison_key`` ignores torch's rank prefix, addresses of native frames, and, in messages about
lost connections, numbers such as ports.
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
_MIN_LINES = 2
_MAX_LINES = 400
"""Lines of one call that are compared, and lines stored per rank."""
_MAX_MATCHES = 4
_MAX_KEYS = 8192
_MAX_AHEAD = 32
"""A candidate with more lines beyond the matching ones is no repetition."""
_MAX_BYTES = 256 << 10
"""Most bytes of a candidate's lines, and of the lines stored per rank."""
_MIN_CHARS = 4
_MAX_CHARS = 4096
"""A repetition begins with a line of _MIN_CHARS to _MAX_CHARS."""
_TRACEBACK = b"Traceback (most recent call last):"
_LOST_CONNECTION_WORDS = (b"peer", b"onnection", b"remote", b"pipe", b"shut")


def comparison_key(line: bytes) -> bytes:
    """Return the part of a line that is equal in lines that count as the same."""
    line = without_rank(line)
    if b"0x" in line and line.lstrip().startswith(b"frame #"):
        import re

        return re.sub(rb"0x[0-9a-f]+", b"0x", line)
    if any(word in line for word in _LOST_CONNECTION_WORDS) and _is_lost_connection(line):
        return line.translate(None, b"0123456789")
    return line


def without_rank(line: bytes) -> bytes:
    """Return the line without torch's prefix ``[rank3]: ``."""
    if line.startswith(b"[rank"):
        number, end, rest = line[5:].partition(b"]:")
        if end and number.isdigit():
            return rest.removeprefix(b" ")
    return line


def _is_lost_connection(line: bytes) -> bool:
    from distlaunch.diagnosis.consequence import Standing, standing_of_text

    return standing_of_text(line.decode("utf-8", "replace")) is Standing.LOST_PEER


class _Shown:
    """The recent lines of a rank, or of a set of ranks, identified by the lowest."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.base = 0
        self.entries: deque[tuple[bytes, bytes, float]] = deque()
        """Comparison key, line, and the time at which it was shown."""
        self._weight = 0

    @property
    def end(self) -> int:
        return self.base + len(self.entries)

    def at(self, position: int) -> tuple[bytes, bytes, float] | None:
        return self.entries[position - self.base] if position >= self.base else None

    def add(self, key: bytes, line: bytes, now: float) -> None:
        self.entries.append((key, line, now))
        self._weight += len(line)
        while self.entries and (
            len(self.entries) > _MAX_LINES
            or self._weight > _MAX_BYTES
            or self.entries[0][2] + WINDOW_S < now
        ):
            self._weight -= len(self.entries.popleft()[1])
            self.base += 1


class _Match:
    """A position in the shown lines at which a block may begin, and the number of lines that match
    so far."""

    __slots__ = ("exact", "found", "shown", "start")

    def __init__(self, shown: _Shown, start: int) -> None:
        self.shown = shown
        self.start = start
        self.found = 0
        self.exact = True

    def compare_more(self, keys: list[bytes], lines: list[bytes]) -> bool:
        """Compare the lines that have come since the last call, and count those that match. Return
        False if one differs."""
        while self.found < len(keys) and (position := self.start + self.found) < self.shown.end:
            entry = self.shown.at(position)
            if entry is None or entry[0] != keys[self.found]:
                return False
            self.exact = self.exact and entry[1] == lines[self.found]
            self.found += 1
        return True


class _Candidate:
    def __init__(self, who: Who, matches: list[_Match], came_s: float) -> None:
        self.who = who
        self.matches = matches
        self.best = matches[0]
        self.keys: list[bytes] = []
        self.lines: list[bytes] = []
        self.came_s: list[float] = []
        self.due = came_s + GAP_S
        self._ends_s = came_s + WINDOW_S
        self._weight = 0

    def add(self, key: bytes, line: bytes, came_s: float) -> bool:
        """Add a line. Return whether the lines may still be a repetition."""
        self.keys.append(key)
        self.lines.append(line)
        self.came_s.append(came_s)
        self._weight += len(line)
        found = self.best.found
        self.compare_more()
        if self.best.found > found:
            self.due = min(came_s + GAP_S, self._ends_s)
        is_full = len(self.lines) >= _MAX_LINES or self._weight > _MAX_BYTES
        return (
            bool(self.matches) and not is_full and len(self.lines) - self.best.found <= _MAX_AHEAD
        )

    def compare_more(self) -> None:
        """Compare with the lines that other ranks have shown since the last comparison, and drop
        matches that differ."""
        self.matches = [match for match in self.matches if self._compare_more(match)]

    def _compare_more(self, match: _Match) -> bool:
        equal = match.compare_more(self.keys, self.lines)
        if match.found > self.best.found:
            self.best = match
        return equal


class _Repetition:
    def __init__(self, of: int, lines: int, due: float) -> None:
        self.of = of
        self.lines = lines
        self.ranks: set[int] = set()
        self.exact = True
        self.due = due

    def text(self) -> bytes:
        count = len(self.ranks)
        ranks = f"{count} ranks " if count > 1 else ""
        numbers = "" if self.exact else " (numbers differ)"
        return f"... {ranks}repeated {self.lines} lines of rank {self.of} above{numbers}".encode()


class RepeatedBlocks:
    """Filters the lines between ``equal_lines`` and the screen."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._shown: dict[int, _Shown] = {}
        self._matches_by_key: dict[bytes, deque[tuple[_Shown, int]]] = {}
        self._candidates: dict[int, _Candidate] = {}
        self._repetitions: dict[tuple[int, int, int], _Repetition] = {}
        self._repetition_of_rank: dict[int, tuple[int, int, int]] = {}

    def add(self, who: Who, lines: list[bytes], now: float) -> None:
        """Add lines of a rank, or of several ranks that wrote the same lines.

        Lines that may repeat a block are held, others are passed on.
        """
        if len(lines) > _MAX_LINES:
            self._end_candidates(who, now)
            self._pass_on(who, lines)
            return
        for line in lines:
            self._add_line(who, line, now, now)

    def flush_due(self, now: float) -> float | None:
        """Show the lines that are due. Return when the next are due."""
        while candidate := next(
            (candidate for candidate in self._candidates.values() if candidate.due <= now), None
        ):
            self._end_candidate(candidate, now)
        for key, repetition in list(self._repetitions.items()):
            if repetition.due <= now:
                self._emit_repetition(key)
        dues = [candidate.due for candidate in self._candidates.values()]
        dues += [repetition.due for repetition in self._repetitions.values()]
        return min(dues, default=None)

    def release(self, rank: int, now: float) -> None:
        """Show all held lines of this rank, and its repetition."""
        self._end_candidates(rank, now)
        if (key := self._repetition_of_rank.get(rank)) is not None:
            self._emit_repetition(key)

    def flush(self, now: float) -> None:
        """Show all lines and repetitions that are held."""
        while self._candidates:
            self._end_candidate(next(iter(self._candidates.values())), now)
        for key in list(self._repetitions):
            self._emit_repetition(key)

    # --- candidates

    def _add_line(self, who: Who, line: bytes, came_s: float, now: float) -> None:
        candidate = self._candidate_of(who, now)
        key = comparison_key(line)
        if (
            candidate is None
            and not _is_indented(line)
            and (matches := self._find_matches(who, key, now))
        ):
            candidate = _Candidate(who, matches, came_s)
            for rank in _ranks_of(who):
                self._candidates[rank] = candidate
        if candidate is None:
            self._pass_on(who, [line])
            self._remember(who, key, line, now)
        elif not candidate.add(key, line, came_s):
            self._end_candidate(candidate, now)

    def _candidate_of(self, who: Who, now: float) -> _Candidate | None:
        """Return the candidate that new lines continue. End other candidates of the same ranks."""
        if not self._candidates:
            return None
        candidate = self._candidates.get(next(iter(_ranks_of(who))))
        if candidate is not None and candidate.who == who:
            return candidate
        self._end_candidates(who, now)
        return None

    def _end_candidates(self, who: Who, now: float) -> None:
        while (
            self._candidates
            and (rank := next((rank for rank in _ranks_of(who) if rank in self._candidates), None))
            is not None
        ):
            self._end_candidate(self._candidates[rank], now)

    def _end_candidate(self, candidate: _Candidate, now: float) -> None:
        """Count the matching lines as a repetition, and show the others."""
        for rank in _ranks_of(candidate.who):
            self._candidates.pop(rank, None)
        candidate.compare_more()
        count = candidate.best.found
        whole = count >= _MIN_LINES and not _is_cut(candidate.lines, count)
        if whole:
            self._count_repetition(candidate, count, now)
        else:
            count = max(1, count)
            self._pass_on(candidate.who, candidate.lines[:count])
            for key, line in zip(candidate.keys[:count], candidate.lines, strict=False):
                self._remember(candidate.who, key, line, now)
        for line, came_s in zip(candidate.lines[count:], candidate.came_s[count:], strict=True):
            self._add_line(candidate.who, line, came_s, now)

    def _count_repetition(self, candidate: _Candidate, count: int, now: float) -> None:
        best = candidate.best
        key = (best.shown.rank, best.start, count)
        ranks = _ranks_of(candidate.who)
        for rank in ranks:
            if (other := self._repetition_of_rank.get(rank)) is not None and (
                other != key or rank in self._repetitions[key].ranks
            ):
                self._emit_repetition(other)
        repetition = self._repetitions.get(key)
        if repetition is None:
            repetition = self._repetitions[key] = _Repetition(
                best.shown.rank, count, now + GATHER_S
            )
        repetition.ranks.update(ranks)
        repetition.exact = repetition.exact and best.exact
        self._repetition_of_rank.update(dict.fromkeys(ranks, key))

    def _emit_repetition(self, key: tuple[int, int, int]) -> None:
        """Emit one line instead of the repeated ones."""
        repetition = self._repetitions.pop(key)
        for rank in repetition.ranks:
            del self._repetition_of_rank[rank]
        ranks = repetition.ranks
        self._emit(next(iter(ranks)) if len(ranks) == 1 else frozenset(ranks), [repetition.text()])

    # --- what was shown

    def _pass_on(self, who: Who, lines: list[bytes]) -> None:
        if self._repetition_of_rank:
            for rank in _ranks_of(who):
                if (key := self._repetition_of_rank.get(rank)) is not None:
                    self._emit_repetition(key)
        self._emit(who, lines)

    def _remember(self, who: Who, key: bytes, line: bytes, now: float) -> None:
        """Store a line that has been shown, for comparison with later ones."""
        rank = who if isinstance(who, int) else min(who)
        shown = self._shown.get(rank)
        if shown is None:
            shown = self._shown[rank] = _Shown(rank)
        if len(key) <= _MAX_CHARS and len(key.strip()) >= _MIN_CHARS:
            if len(self._matches_by_key) > _MAX_KEYS:
                self._matches_by_key.clear()
            self._matches_by_key.setdefault(key, deque(maxlen=_MAX_MATCHES)).append(
                (shown, shown.end)
            )
        shown.add(key, line, now)

    def _find_matches(self, who: Who, key: bytes, now: float) -> list[_Match]:
        known = self._matches_by_key.get(key)
        if known is None:
            return []
        ranks = _ranks_of(who)
        matches = []
        for shown, start in islice(reversed(known), _MAX_MATCHES):
            entry = shown.at(start)
            if entry is not None and entry[2] + WINDOW_S >= now and shown.rank not in ranks:
                matches.append(_Match(shown, start))
        return matches


def _is_indented(line: bytes) -> bool:
    return without_rank(line)[:1] in (b" ", b"\t")


def _is_cut(lines: list[bytes], count: int) -> bool:
    """Return whether the lines end inside a traceback or another indented block."""
    if count < len(lines) and _is_indented(lines[count]):
        return True
    for line in reversed(lines[:count]):
        if not _is_indented(line):
            return _TRACEBACK in line
    return False


def _ranks_of(who: Who) -> frozenset[int] | tuple[int]:
    return (who,) if isinstance(who, int) else who
