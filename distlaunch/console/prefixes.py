"""Select the ranks that are shown, and make prefixes."""

from __future__ import annotations

from collections.abc import Mapping

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import format_ranks, name_ranks, quoted

RESET = b"\x1b[0m"
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
"""Ranks have these colours in turn. Red is for the launcher's errors."""
_CACHED = 4096


def may_colour(environ: Mapping[str, str]) -> bool:
    """Return whether a terminal may get colours, by NO_COLOR and TERM."""
    return not environ.get("NO_COLOR") and not is_dumb(environ)


def is_dumb(environ: Mapping[str, str]) -> bool:
    """Return whether the terminal has no control sequences, by TERM."""
    return environ.get("TERM") in ("dumb", "unknown")


def parse_output_ranks(text: str, world_size: int) -> frozenset[int] | None:
    """Return the ranks that --output selects: None for ``all``, no rank for ``none``, or a list as
    ``0,2-5``.

    Raises ConfigError for other text and for ranks that do not exist.
    """
    value = text.strip()
    if value == "all":
        return None
    if value == "none":
        return frozenset()
    return read_ranks(value, str(Opt.OUTPUT), world_size, takes="all, none, or ranks such as 0,2-5")


def read_ranks(
    text: str, option: str, world_size: int, *, takes: str = "ranks such as 0,2-5"
) -> frozenset[int]:
    """Return the ranks of a list such as ``0,2-5``, the value of ``option``.

    ``takes`` says in a hint which values the option has. Raises ConfigError for other text and for
    ranks that do not exist.
    """
    given = f"{option} {text}"
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        low = _read_rank(first, given, world_size, takes)
        high = _read_rank(last, given, world_size, takes) if dash else low
        if high < low:
            raise ConfigError(
                f"{given}: the range {part.strip()} runs backwards", hint=f"write {high}-{low}"
            )
        ranks.update(range(low, high + 1))
    return frozenset(ranks)


def _read_rank(part: str, given: str, world_size: int, takes: str) -> int:
    digits = part.strip()
    if not (digits.isascii() and digits.isdecimal()):
        raise ConfigError(f"{given}: {quoted(digits)} is not a rank", hint=takes)
    number = digits.lstrip("0") or "0"
    if len(number) > len(str(world_size)) or int(number) >= world_size:
        raise ConfigError(
            f"{given}: there is no rank {number}",
            hint=f"this job has {name_ranks(range(world_size))}",
        )
    return int(number)


class Prefixes:
    """Prefixes of lines: ``[3] ``, or ``[0-7] `` for several ranks."""

    def __init__(self, *, colour: bool) -> None:
        self._colour = colour
        self._cache: dict[int | frozenset[int], bytes] = {}

    def __call__(self, who: int | frozenset[int]) -> bytes:
        """Return the prefix of a rank, or of several. A rank always has the same colour."""
        prefix = self._cache.get(who)
        if prefix is None:
            if len(self._cache) >= _CACHED:
                self._cache.clear()
            prefix = self._cache[who] = self._format(who)
        return prefix

    def _format(self, who: int | frozenset[int]) -> bytes:
        label = f"[{who if isinstance(who, int) else format_ranks(who)}]"
        if not self._colour:
            return f"{label} ".encode()
        sgr = _COLOURS[who % len(_COLOURS)] if isinstance(who, int) else 1
        return f"\x1b[{sgr}m{label}\x1b[0m ".encode()
