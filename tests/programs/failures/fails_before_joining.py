# expect-rank: 0
# expect-exit: 1
# expect-cause: RuntimeError: cannot read the config
# expect-frame: fails_before_joining.py:11 in read_config
"""Rank 0 fails before it opens the store: the others never get a group, and know nothing of the reason."""

from _group import RANK, join


def read_config() -> None:
    raise RuntimeError("cannot read the config")


if RANK == 0:
    read_config()
join(timeout_s=2)
