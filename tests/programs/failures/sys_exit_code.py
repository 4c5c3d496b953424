# expect-rank: 3
# expect-exit: 7
# expect-cause: exit code 7
"""A bare exit code, with an ordinary last line on stderr."""

import sys

from _group import RANK, sleep_until_stopped

if RANK == 3:
    print("giving up: validation set is empty", file=sys.stderr)
    sys.exit(7)
sleep_until_stopped()
