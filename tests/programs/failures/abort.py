# expect-rank: 2
# expect-exit: 134
# expect-cause: SIGABRT
"""abort() without a message."""

import os

from _group import RANK, sleep_until_stopped

if RANK == 2:
    os.abort()
sleep_until_stopped()
