# expect-rank: 0
# expect-exit: 135
# expect-cause: SIGBUS
# expect-hint: /dev/shm
"""A mapped file that is shorter than its mapping: what a full /dev/shm looks like."""

import mmap
import tempfile

from _group import RANK, sleep_until_stopped

if RANK == 0:
    with tempfile.TemporaryFile() as file:
        file.truncate(8192)
        mapping = mmap.mmap(file.fileno(), 8192)
        file.truncate(0)
        mapping[5000] = 1
sleep_until_stopped()
