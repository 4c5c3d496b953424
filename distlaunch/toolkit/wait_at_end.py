"""Wait for the other workers before the process group ends, for a bounded time.

Workers count themselves in the group's store. A barrier is not suitable: gloo limits its time only
on rank 0, another worker would match it with another collective, and an abandoned one blocks the
destruction of the group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

END_S = 10.0
"""The others may still need the store of a worker that ends."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1
"""First and longest pause between two reads of the store."""

_calls_before_end: list[Callable[[], None]] = []
_uses: dict[str, int] = {}
_incomplete_group: object = None
"""Some workers did not reach its end, so it was not destroyed."""


def wait_for_all_workers(name: str) -> bool:
    """Wait up to ``END_S`` until all workers have called this for the purpose ``name``. Return
    whether they have.

    All workers must call it equally often.
    """
    _uses[name] = use = _uses.get(name, 0) + 1
    came, left = (f"distlaunch/{name}/{use}/{what}" for what in ("came", "left"))
    until = time.monotonic() + END_S
    try:
        size, rank = dist.get_world_size(), dist.get_rank()
        store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way to it
        store.add(came, 1)
        all_came = _wait_for_count(store, came, size, until)
    except (RuntimeError, ValueError, AttributeError):
        # The worker that serves the store has ended; or there is no group; or it has no store.
        return False
    with suppress(RuntimeError):
        store.add(left, 1)
        # Rank 0 usually serves the store, so it waits until the others have read the counter.
        if all_came and rank == 0:
            _wait_for_count(store, left, size, until)
    return all_came


def call_before_end(finish: Callable[[], None]) -> None:
    """Register a function that completes pending work before the groups end."""
    _calls_before_end.append(finish)


def cancel_call_before_end(finish: Callable[[], None]) -> None:
    """Cancel ``call_before_end``."""
    if finish in _calls_before_end:
        _calls_before_end.remove(finish)


def end_process_group() -> None:
    """Destroy all process groups when all workers have called this. Waits up to ``END_S``.

    The functions of ``call_before_end`` are called first. If a worker does not call in time, the
    groups remain, and later calls do not wait. ``destroy_process_group`` waits for pending
    collectives. Otherwise gloo's threads, some of which belong to DDP, may hold a tensor while
    Python exits, and then abort the process.
    """
    global _incomplete_group  # noqa: PLW0603 - one group a process, as in torch
    while _calls_before_end:
        _calls_before_end.pop()()
    if not dist.is_initialized() or dist.group.WORLD is _incomplete_group:
        return
    if dist.get_world_size() == 1 or wait_for_all_workers("end"):
        dist.destroy_process_group()
    else:
        _incomplete_group = dist.group.WORLD


def _wait_for_count(store: Any, key: str, count: int, until: float) -> bool:
    """Poll a counter. Return False at the time ``until``.

    A blocking wait in the store would delay signals, and old stores fail after it.
    """
    pause = _FIRST_PAUSE_S
    while store.add(key, 0) < count:
        rest = until - time.monotonic()
        if rest <= 0:
            return False
        time.sleep(min(pause, rest))
        pause = min(pause * 2, _LONGEST_PAUSE_S)
    return True
