"""Words that come from outside, made fit to stand in a line of ours.

Three kinds of text need three ways: a user's word within a message (``quoted``), a line of ours
with names in it (``printable``), and what workers write, byte for byte, to a terminal
(``ui.console.escapes.clean``).

Ranks, written as people write them.
"""

from __future__ import annotations

from collections.abc import Iterable

_LONGEST = 80
_BYTE = "\udc80", "\udcff"
_BYTE_BASE = 0xDC00


def printable(text: str, *, keep: str = "") -> str:
    r"""Escape what would end the line, move the cursor or retitle the terminal: ``\n``, ``\x1b``,
    and so on.

    A byte of a path that is not UTF-8 is written ``\xff``. ``keep``: characters to leave alone
    (newlines, mostly).
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else _escaped(char) for char in text)


def quoted(text: str) -> str:
    """Quote what the user wrote, printable and short enough for one line."""
    quote = '"' if "'" in text and '"' not in text else "'"
    if len(text) <= _LONGEST:
        return f"{quote}{printable(text)}{quote}"
    return f"{quote}{printable(text[: _LONGEST - 3])}{quote}..."


def _escaped(char: str) -> str:
    first, last = _BYTE
    if first <= char <= last:
        return f"\\x{ord(char) - _BYTE_BASE:02x}"
    return char.encode("unicode_escape").decode()


def counted(number: int, noun: str) -> str:
    """Write a number of things: ``1 worker``, ``2 workers``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ended_how(returncode: int) -> str:
    """Say how a process ended: ``ended with 1``, ``was killed by signal 9``."""
    return f"was killed by signal {-returncode}" if returncode < 0 else f"ended with {returncode}"


_LONGEST_RANKS = 160


def format_ranks(ranks: Iterable[int]) -> str:
    """Write ranks the way people do: ``0,2-5``; the input may be in any order."""
    parts: list[str] = []
    ordered = sorted(set(ranks))
    start = 0
    while start < len(ordered):
        end = start
        while end + 1 < len(ordered) and ordered[end + 1] == ordered[end] + 1:
            end += 1
        first, last = ordered[start], ordered[end]
        parts.append(str(first) if first == last else f"{first}-{last}")
        start = end + 1
    return ",".join(parts)


def name_ranks(ranks: Iterable[int]) -> str:
    """Write ranks as a sentence has them: ``rank 0``, ``ranks 0,2-5``; only the first of very many
    that lie apart."""
    those = set(ranks)
    text = format_ranks(those)
    if len(text) > _LONGEST_RANKS:
        return f"ranks {text[:_LONGEST_RANKS].rpartition(',')[0]},... ({len(those):,} in all)"
    return f"rank {text}" if text.isdigit() else f"ranks {text}"
