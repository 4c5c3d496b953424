"""Format text for messages: quoted user input, counts, exit statuses and lists of ranks.

``quoted`` is for user input within a message, ``printable`` for a whole line with names: text from
outside may contain characters that end a line or move the cursor. The console has its own rules for
output of workers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

_LONGEST = 80
_BYTE = "\udc80", "\udcff"
_BYTE_BASE = 0xDC00
_LONGEST_RANKS = 160
_KIB = 1024.0


def quoted(text: str) -> str:
    """Return user input in quotes, unprintable characters escaped, shortened to fit one line."""
    quote = '"' if "'" in text and '"' not in text else "'"
    if len(text) <= _LONGEST:
        return f"{quote}{printable(text)}{quote}"
    return f"{quote}{printable(text[: _LONGEST - 3])}{quote}..."


def printable(text: str, *, keep: str = "") -> str:
    """Return ``text`` with escapes for characters that end the line or control the terminal.

    Newline and escape are written as in Python strings, a byte of a path that is not UTF-8 in
    hexadecimal. ``keep`` lists characters that stay (mostly newlines).
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else _escape(char) for char in text)


def errno_clause(number: int | None) -> str:
    """Return the system's message for an errno as a clause: ``connection refused``."""
    text = os.strerror(number or 0)
    return text[:1].lower() + text[1:]


def host_and_port(host: str, port: object) -> str:
    """Return ``10.0.0.7:22`` or, for an IPv6 address, ``[fd00::7]:22``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _escape(char: str) -> str:
    first, last = _BYTE
    if first <= char <= last:
        return f"\\x{ord(char) - _BYTE_BASE:02x}"
    return char.encode("unicode_escape").decode()


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 worker``, ``2 workers``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_size(count: float) -> str:
    """Return a number of bytes with four digits: ``1.5 GiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < _KIB:
            return f"{count:.4g} {unit}"
        count /= _KIB
    return f"{count:.4g} TiB"


def ended_how(returncode: int) -> str:
    """Return how a process ended: ``ended with 1``, ``was killed by signal 9``."""
    return f"was killed by signal {-returncode}" if returncode < 0 else f"ended with {returncode}"


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ranks with their noun: ``rank 0``, ``ranks 0,2-5``, shortened if very long."""
    those = set(ranks)
    text = format_ranks(those)
    if len(text) > _LONGEST_RANKS:
        return f"ranks {text[:_LONGEST_RANKS].rpartition(',')[0]},... ({len(those):,} in all)"
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks, in any order, in compact form: ``0,2-5``."""
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


def near_choices(text: str, choices: Sequence[str], *, most: int = 1) -> list[str]:
    """Return the choices that a text is likely to mean, the most likely first.

    These are similar words, words that the text begins (``js`` for json), and short forms of the
    text (``md`` for markdown).
    """
    from difflib import get_close_matches

    word = text.strip().lower()
    by_word = {choice.lower(): choice for choice in choices}
    near = get_close_matches(word, by_word, n=most)
    if word:
        near += [each for each in by_word if each.startswith(word) or _is_short_for(each, word)]
    return [by_word[each] for each in list(dict.fromkeys(near))[:most]]


def _is_short_for(short: str, word: str) -> bool:
    """Return whether all letters of ``short`` stand in this order in the word, from its first."""
    letters = iter(word)
    return short[:1] == word[:1] and all(letter in letters for letter in short)
