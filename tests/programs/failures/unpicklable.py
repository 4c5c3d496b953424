# expect-rank: 0
# expect-exit: 1
# expect-cause: local object
# expect-frame: unpicklable.py:13 in save
"""A lambda goes into a checkpoint."""

import pickle

from _group import RANK, sleep_until_stopped


def save() -> bytes:
    return pickle.dumps({"schedule": lambda step: step})


if RANK == 0:
    save()
sleep_until_stopped()
