# expect-rank: 1
# expect-exit: 132
# expect-cause: SIGILL
# expect-hint: another CPU
"""A binary built for another CPU."""

import os
import signal

from _group import RANK, sleep_until_stopped

if RANK == 1:
    os.kill(os.getpid(), signal.SIGILL)
sleep_until_stopped()
