# expect-rank: 2
# expect-exit: 1
# expect-cause: MemoryError
# expect-hint: host memory
# expect-frame: address_space_limit.py:14 in load
"""RLIMIT_AS makes an allocation fail: MemoryError without a message."""

import resource

from _group import RANK, sleep_until_stopped


def load(size: int) -> bytearray:
    return bytearray(size)


if RANK == 2:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    load(2 << 30)
sleep_until_stopped()
