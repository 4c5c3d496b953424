# expect-rank: 1
# expect-exit: 1
# expect-cause: ExceptionGroup: 2 shards failed
# expect-original: ValueError: shard 3 is empty
"""An exception group: the group and its first leaf are named (Python >= 3.11)."""

from _group import RANK, sleep_until_stopped


def read(shard: int) -> None:
    raise ValueError(f"shard {shard} is empty")


def read_all() -> None:
    errors = []
    for shard in (3, 4):
        try:
            read(shard)
        except ValueError as exc:
            errors.append(exc)
    raise ExceptionGroup("2 shards failed", errors)  # noqa: F821 - Python 3.11 has it


if RANK == 1:
    read_all()
sleep_until_stopped()
