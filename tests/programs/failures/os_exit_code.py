# expect-rank: 0
# expect-exit: 9
# expect-cause: exit code 9
"""os._exit without a word."""

import os

from _group import RANK, sleep_until_stopped

if RANK == 0:
    os._exit(9)
sleep_until_stopped()
