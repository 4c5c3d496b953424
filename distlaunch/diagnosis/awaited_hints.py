"""Choose the hint for ranks that waited for another one until a timeout. No I/O."""

from __future__ import annotations

import re

from distlaunch.core.model.text import name_ranks
from distlaunch.diagnosis.awaited import Awaited

_KEY = re.compile(
    # torch 2.0 to 2.13: "wait timeout after 5000ms, keys: /vocab". Older versions wrote "Timeout
    # waiting for key: default_pg/0/0 after 5000 ms".
    r"(?:wait timeout after \d+ ?ms, keys: |timeout waiting for key: )/?(?P<key>[^\s,]+)",
    re.IGNORECASE,
)
_GROUP = re.compile(r"^default_pg/\d+//")
_KEY_OF_TORCH = re.compile(r"default_pg|store_based_barrier|worker_count|torchelastic|rank|init/")
"""Parts of keys that torch sets itself."""
_STALL = ("missing ranks", "stalled ops", "waiting for remainder of ranks")
_OTHER_LIBRARIES = ("horovod", "coordination service", "collective ops", "jax", "mpi4py")
_WATCHDOG = ("heartbeat", "watchdog")


def hint_for_awaited(awaited: Awaited, text: str) -> str | None:
    """Return what the user can do about the awaited ranks.

    ``text`` is what the waiting ranks have written about the timeout. Return None if the awaited
    ranks neither stayed away nor were behind.
    """
    ranks = name_ranks(awaited.ranks[:1])
    low = text.lower()
    if awaited.is_behind:
        return (
            "ranks issue different collectives, or one is behind: look for a collective under a "
            "condition on the rank, and for unequal numbers of batches"
        )
    if not awaited.is_absent:
        return None
    if awaited.place_hint is not None:
        return f"{ranks}: {awaited.place_hint}"
    there = "at that line" if awaited.frame else "meanwhile"
    if any(mark in low for mark in _STALL):
        return (
            "all ranks must call the same collectives of Horovod, with the same names, in the same "
            f"order: see what {ranks} did {there}"
        )
    if (key := _key(text)) is not None:
        return (
            f"the others wait for the key {key} of the store, which {ranks} has not set: see what "
            f"it did {there}; set the key earlier, or wait longer for it"
        )
    if any(mark in low for mark in _WATCHDOG):
        return (
            f"{ranks} was blocked or at work {there}, and the others waited in NCCL: do long work on "
            "all ranks or before init_process_group, or raise its timeout="
        )
    if any(mark in low for mark in _OTHER_LIBRARIES):
        return (
            f"see what {ranks} did {there}: do long work before the group is made or on all "
            "ranks, or raise the timeout"
        )
    return (
        f"see what {ranks} did {there}: do long work before init_process_group or on all ranks, "
        "or raise the timeout (timeout= of init_process_group or monitored_barrier)"
    )


def _key(text: str) -> str | None:
    """Return the store key for which ranks have waited, if the script itself has chosen it; None
    for keys of torch.

    The prefix that torch adds is removed.
    """
    found = _KEY.search(text)
    if found is None:
        return None
    key = _GROUP.sub("", found["key"])
    return None if "//" in key or key.isdigit() or _KEY_OF_TORCH.search(key) else key
