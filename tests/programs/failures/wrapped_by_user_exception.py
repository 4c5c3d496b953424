# expect-rank: 3
# expect-exit: 1
# expect-cause: OSError: shard 7 is truncated
# expect-frame: wrapped_by_user_exception.py:27 in <module>
"""Every rank wraps what it meets into its own exception: only one of them wraps a cause."""

from _group import RANK, join, steps


class TrainingError(Exception):
    """The program's own exception class."""


join()


def read_shard() -> None:
    if RANK == 3:
        raise OSError("shard 7 is truncated")


try:
    steps(2)
    read_shard()
    steps(10**9)
except Exception as exc:
    raise TrainingError(f"training failed on rank {RANK}") from exc
