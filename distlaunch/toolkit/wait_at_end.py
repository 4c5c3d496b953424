"""How workers wait for each other before they end, for a bounded time and beside all collectives.

They meet at the process group's store. A barrier of the group will not do: gloo's has a limit on
rank 0 alone, any other collective pairs with what a worker that is not about to end has begun, and
one that was given up holds up the group's end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

END_S = 10.0
"""So long a worker that is about to end waits for the others, which may still need it."""

_FIRST_S, _LAST_S = 0.001, 0.1
"""How often the store is asked, at first and in the end."""

_first: list[Callable[[], None]] = []
"""What has to be done before the groups end."""
_turns: dict[str, int] = {}
_late: object = None
"""The process group whose workers did not come to its end."""


def meet(name: str) -> bool:
    """Wait for all workers to call this, at most ``END_S``; tell whether they have.

    ``name``: what for. Each worker has to meet the others equally often for it.
    """
    _turns[name] = turn = _turns.get(name, 0) + 1
    came, left = (f"distlaunch/{name}/{turn}/{what}" for what in ("came", "left"))
    until = time.monotonic() + END_S
    try:
        size, rank = dist.get_world_size(), dist.get_rank()
        store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - a script's own group tells it nowhere else
        store.add(came, 1)
        met = _reaches(store, came, size, until)
    except (
        RuntimeError,
        ValueError,
        AttributeError,
    ):  # the store's keeper has ended; no group; a group without a store
        return False
    with suppress(RuntimeError):
        store.add(left, 1)
        if (
            met and rank == 0
        ):  # which keeps the store as a rule: the others have to read there that all have come
            _reaches(store, left, size, until)
    return met


def end_after(finish: Callable[[], None]) -> None:
    """Have something done before the groups end: what is under way in them becomes whole."""
    _first.append(finish)


def end_without(finish: Callable[[], None]) -> None:
    """Take back what ``end_after`` was given."""
    if finish in _first:
        _first.remove(finish)


def end_process_group() -> None:
    """End torch's groups when all workers have come so far, or leave them as they are where some do
    not come.

    Ending a group waits for what is under way in it; and gloo's threads, which DDP keeps, abort a
    Python that ends while they hold a tensor.
    """
    global _late  # noqa: PLW0603 - one group a process, as in torch
    while _first:
        _first.pop()()
    if not dist.is_initialized() or dist.group.WORLD is _late:
        return
    if dist.get_world_size() == 1 or meet("end"):
        dist.destroy_process_group()
    else:
        _late = dist.group.WORLD


def _reaches(store: Any, key: str, count: int, until: float) -> bool:
    """Ask for a number again and again: a wait in the store keeps signals waiting, and older ones
    fail after it."""
    pause = _FIRST_S
    while store.add(key, 0) < count:
        rest = until - time.monotonic()
        if rest <= 0:
            return False
        time.sleep(min(pause, rest))
        pause = min(pause * 2, _LAST_S)
    return True
