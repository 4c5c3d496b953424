# expect-rank: 1
# expect-exit: 1
# expect-cause: no checkpoint in /data/run7
"""sys.exit("text") leaves no traceback: the text is the cause."""

import sys

from _group import RANK, sleep_until_stopped

if RANK == 1:
    sys.exit("no checkpoint in /data/run7")
sleep_until_stopped()
