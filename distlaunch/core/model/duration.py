"""Convert durations that users write, such as ``30s`` or ``1h30m``, to seconds."""

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


def _split_leading(text: str, letters: str) -> tuple[str, str]:
    """Split the text after its leading characters that are among ``letters``."""
    rest = text.lstrip(letters)
    return text[: len(text) - len(rest)], rest
