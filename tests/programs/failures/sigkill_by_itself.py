# expect-rank: 2
# expect-exit: 137
# expect-cause: SIGKILL
# expect-hint: dmesg
"""One rank is killed without a word, as by an operator or an out-of-memory killer."""

import os
import signal

from _group import RANK, join, steps

join()
steps(3)
if RANK == 2:
    os.kill(os.getpid(), signal.SIGKILL)
steps(10**9)
