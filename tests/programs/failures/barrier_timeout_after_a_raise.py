# expect-rank: 2
# expect-exit: 1
# expect-cause: PermissionError: [Errno 13]
# expect-frame: barrier_timeout_after_a_raise.py:20 in save
"""One rank fails and is slow to leave: the others' barrier times out first."""

import time

from _group import RANK, join, steps

join(timeout_s=2)


def save() -> None:
    steps(2)
    if RANK == 2:
        try:
            time.sleep(0.1)
        finally:
            raise PermissionError(13, "Permission denied", "/root/checkpoint.pt")


try:
    save()
    steps(10**9)
except PermissionError:
    time.sleep(3)
    raise
