"""Which ranks are shown, and the prefix that their lines get."""

from __future__ import annotations

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.text import format_ranks, name_ranks

RESET = b"\x1b[0m"
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
"""SGR foregrounds, one per rank in turn; red is left out, it is for our own errors."""
_CACHED = 4096


def parse_output_ranks(text: str, world_size: int) -> frozenset[int] | None:
    """Read ``--output``: ``all`` (gives None), ``none`` or ranks such as ``0,2-5``; ConfigError if
    it is neither."""
    word = text.strip()
    if word == "all":
        return None
    if word == "none":
        return frozenset()
    ranks: set[int] = set()
    for part in word.split(","):
        first, dash, last = part.strip().partition("-")
        low = _rank(first, text, world_size)
        high = _rank(last, text, world_size) if dash else low
        if high < low:
            raise ConfigError(
                f"--output {text}: the range {part.strip()} runs backwards",
                hint=f"write {high}-{low}",
            )
        ranks.update(range(low, high + 1))
    return frozenset(ranks)


def _rank(word: str, text: str, world_size: int) -> int:
    digits = word.strip()
    if not (digits.isascii() and digits.isdecimal()):
        raise ConfigError(
            f"--output {text}: '{digits}' is not a rank", hint="all, none, or ranks such as 0,2-5"
        )
    number = digits.lstrip("0") or "0"
    if len(number) > len(str(world_size)) or int(number) >= world_size:
        raise ConfigError(
            f"--output {text}: there is no rank {number}",
            hint=f"this job has {name_ranks(range(world_size))}",
        )
    return int(number)


class Prefixes:
    """What stands before each line: ``[3] ``, or ``[0-7] `` where a line is the same on several
    ranks."""

    def __init__(self, *, colour: bool) -> None:
        self._colour = colour
        self._made: dict[int | frozenset[int], bytes] = {}

    def __call__(self, who: int | frozenset[int]) -> bytes:
        """Return the prefix of one rank or of a set of ranks, a stable colour for each rank."""
        prefix = self._made.get(who)
        if prefix is None:
            if len(self._made) >= _CACHED:
                self._made.clear()
            prefix = self._made[who] = self._make(who)
        return prefix

    def _make(self, who: int | frozenset[int]) -> bytes:
        label = f"[{who if isinstance(who, int) else format_ranks(who)}]"
        if not self._colour:
            return f"{label} ".encode()
        sgr = _COLOURS[who % len(_COLOURS)] if isinstance(who, int) else 1
        return f"\x1b[{sgr}m{label}\x1b[0m ".encode()
