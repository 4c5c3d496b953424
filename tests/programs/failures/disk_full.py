# expect-rank: 1
# expect-exit: 1
# expect-cause: OSError: [Errno 28] No space left on device
# expect-hint: df -h
# expect-frame: disk_full.py:13 in checkpoint
"""The disk is full while a checkpoint is written."""

from _group import RANK, sleep_until_stopped


def checkpoint() -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"weights")


if RANK == 1:
    checkpoint()
sleep_until_stopped()
