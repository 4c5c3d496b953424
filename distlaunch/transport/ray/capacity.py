"""Which bundles (CPUs and GPUs on one node) fit into a Ray cluster, and messages about bundles that
do not fit. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from distlaunch.core.model.option_names import Opt

_SHOWN = 8
_LONGEST = 600
_GRAIN = 1e-4
"""Ray counts resources in units of this size."""
_STAMP = re.compile(
    rb"^(?:\x1b\[\d*m)*"
    rb"(?:\[\d{4}-\d\d-\d\d [^\]\n]*\] (?:\([^)\n]*\) )?\S+:\d+:|\d{4}-\d\d-\d\d \S+\s+[A-Z]+ "
    rb"\S+:\d+ --) *",
    re.MULTILINE,
)
"""How log lines of Ray begin: ``[2026-01-31 10:00:00,000 E 7 9] (driver) a.cc:12:`` and, from
Python, ``2026-01-31 10:00:00,000 ERROR a.py:12 --``."""

_OF_ACTOR = re.compile(r"(?:class_name|actor_id|pid|name|namespace|ip): \S*")

Bundle = Mapping[str, float]


class RayError(Exception):
    """A request to Ray failed. ``passing``: a later try may succeed."""

    def __init__(self, text: str, *, hint: str | None = None, passing: bool = True) -> None:
        super().__init__(text)
        self.hint = hint
        self.passing = passing


def bundle_for_each_gpu(nodes: Sequence[Mapping[str, Any]], each: Bundle) -> list[Bundle]:
    """Return a bundle like ``each`` for each GPU of the cluster. Raises RayError if it has none.

    ``nodes`` is the result of ``ray.nodes()``.
    """
    count = int(sum(node["Resources"].get("GPU", 0) for node in nodes))
    if not count:
        hint = (
            f"{Opt.NUM_PROCS} N starts N workers without GPUs, {Opt.NUM_GPUS} N waits for "
            "nodes with GPUs"
        )
        raise RayError("no node of the Ray cluster has a GPU", hint=hint, passing=False)
    return [each] * count


def describe_shortage(
    bundles: Sequence[Bundle], strategy: str, nodes: Sequence[Mapping[str, Any]], free: Bundle
) -> str:
    """Return a message about the bundles that Ray cannot reserve.

    ``free`` are the free resources of the whole cluster.
    """
    without = bundles_without_room(bundles, strategy, nodes)
    which = without or range(len(bundles))
    names = {name for bundle in bundles for name in bundle}
    there = "; ".join(
        f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}) has "
        f"{_format_amounts(node['Resources'], names)}"
        for node in nodes[:_SHOWN]
    )
    more = f"; and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
    numbers = ", ".join(map(str, which[:_SHOWN])) + (", ..." if len(which) > _SHOWN else "")
    shapes = " or ".join(
        dict.fromkeys(_format_amounts(bundles[number], bundles[number]) for number in which)
    )
    if not without:
        why = f"which are in use, or not free together ({strategy})"
    else:
        why = "for which there is no node" + (
            " of its own" if strategy == "STRICT_SPREAD" else " with room"
        )
    count = f"{len(which)} of {len(bundles)} bundles ({numbers})"
    return (
        f"Ray has no place for {count} of {shapes}, {why}: {there or 'no node is there'}{more}; "
        "free: " + _format_amounts(free, names)
    )


def bundles_without_room(
    bundles: Sequence[Bundle], strategy: str, nodes: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Return the numbers of the bundles that find no room, in order, even if the cluster were
    idle."""
    left = [dict(node["Resources"]) for node in nodes]
    without = []
    for number, bundle in enumerate(bundles):
        room = next((each for each in left if _has_room(each, bundle)), None)
        if room is None:
            without.append(number)
        elif strategy == "STRICT_SPREAD":
            room.clear()
        else:
            for name, need in bundle.items():
                room[name] -= need
    return without


def _has_room(room: Bundle, bundle: Bundle) -> bool:
    return all(room.get(name, 0) > need - _GRAIN / 2 for name, need in bundle.items())


def _format_amounts(resources: Bundle, names: Mapping[str, float] | set[str]) -> str:
    return ", ".join(f"{name} {resources.get(name, 0):g}" for name in sorted(names))


def error_line(exc: BaseException) -> str:
    """Return an error as one line, without ids that only Ray uses."""
    lines = [line.strip() for line in str(exc).splitlines()]
    text = " ".join(line for line in lines if line and not _OF_ACTOR.fullmatch(line))
    if len(text) > _LONGEST:
        text = text[:_LONGEST].rpartition(" ")[0] + " ..."
    return text or type(exc).__name__


def strip_log_prefixes(words: bytes) -> bytes:
    """Return the text without the prefixes of Ray's log lines."""
    return _STAMP.sub(b"", words)
