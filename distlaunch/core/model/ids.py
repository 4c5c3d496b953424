"""Layer core.model: the field's numbers, each with a type of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NewType

Rank = NewType("Rank", int)
"""Global rank of a worker, 0 .. world size - 1."""

LocalRank = NewType("LocalRank", int)
"""Rank of a worker within its node."""

NodeRank = NewType("NodeRank", int)
"""Index of a node in topology order."""

Attempt = NewType("Attempt", int)
"""Which start of the job this is: 0 for the first, k after k restarts."""


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
    """Write ranks as a sentence has them: ``rank 0``, ``ranks 0,2-5``."""
    text = format_ranks(ranks)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"
