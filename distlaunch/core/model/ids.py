"""Ranks, written as people write them."""

from __future__ import annotations

from collections.abc import Iterable

_LONGEST = 160


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
    """Write ranks as a sentence has them: ``rank 0``, ``ranks 0,2-5``; only the first of very many that lie apart."""
    those = set(ranks)
    text = format_ranks(those)
    if len(text) > _LONGEST:
        return f"ranks {text[:_LONGEST].rpartition(',')[0]},... ({len(those):,} in all)"
    return f"rank {text}" if text.isdigit() else f"ranks {text}"
