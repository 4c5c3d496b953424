"""Read durations that users write, such as ``30s`` or ``1h30m``, and format durations for people.

Sentences and reports have ``format_duration``, tables and lines of state ``format_age``.
"""

from __future__ import annotations

_UNITS_S = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}


def read_duration(text: str, *, unit_s: float = 1.0) -> float | None:
    """Return the seconds of ``30``, ``2.5``, ``30s``, ``10min``, ``2 hours`` or ``1h30m``; None for
    other text.

    A number without a unit is multiplied by ``unit_s``.
    """
    rest = text.lower()
    total_s = 0.0
    while rest:
        number, rest = _split_leading(rest, "0123456789.")
        unit, rest = _split_leading(rest.lstrip(" "), "abcdefghijklmnopqrstuvwxyz")
        if not number.replace(".", "", 1).isdigit():
            return None
        if not unit and not rest and number == text:
            return float(number) * unit_s
        if unit not in _UNITS_S:
            return None
        total_s += float(number) * _UNITS_S[unit]
        rest = rest.lstrip(" ")
    return total_s if text else None


_LENGTHS_S = (86400, 3600, 60, 1)
"""Of days, hours, minutes and seconds."""
_NAMES = ("d", "h", "min", "s")
_LETTERS = "dhms"
_MINUTE_S = 60
_INFINITE_S = float("inf")
_LONGEST_IN_SECONDS_S = 59.95
"""A longer duration has 60 seconds in three digits."""


def format_duration(seconds: float) -> str:
    """Return ``350 ms``, ``12.5 s``, ``4 min 10 s`` or ``2 h 5 min``; ``?`` if it is not finite."""
    if not abs(seconds) < _INFINITE_S:  # false for NaN, too
        return "?"
    seconds = max(0.0, seconds)
    if 0 < seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < _LONGEST_IN_SECONDS_S:
        return f"{seconds:.3g} s"
    place, count, rest = _two_units(round(seconds))
    return f"{count} {_NAMES[place]}" + (f" {rest} {_NAMES[place + 1]}" if rest else "")


def format_age(seconds: float) -> str:
    """Return whole units, at most two: ``3d 4h``, ``5m 20s``, ``12s``; ``?`` if it is not
    finite."""
    if not abs(seconds) < _INFINITE_S:
        return "?"
    whole = max(0, int(seconds))
    if whole < _MINUTE_S:
        return f"{whole}s"
    place, count, rest = _two_units(whole)
    return f"{count}{_LETTERS[place]} {rest}{_LETTERS[place + 1]}"


def _two_units(whole_s: int) -> tuple[int, int, int]:
    """Return the place of the largest unit of a minute or more, its count, and that of the next
    unit."""
    place = next(place for place, unit_s in enumerate(_LENGTHS_S) if whole_s >= unit_s)
    count, rest_s = divmod(whole_s, _LENGTHS_S[place])
    return place, count, rest_s // _LENGTHS_S[place + 1]


def _split_leading(text: str, letters: str) -> tuple[str, str]:
    """Split the text after its leading characters that are among ``letters``."""
    rest = text.lstrip(letters)
    return text[: len(text) - len(rest)], rest
