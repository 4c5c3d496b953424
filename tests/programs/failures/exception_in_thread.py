# expect-rank: 2
# expect-exit: 5
# expect-cause: LookupError: prefetch queue is gone
# expect-frame: exception_in_thread.py:15 in prefetch
"""A thread dies; the main thread notices and leaves with a bare exit code."""

import sys
import threading

from _group import RANK, sleep_until_stopped


def prefetch() -> None:
    if RANK == 2:
        raise LookupError("prefetch queue is gone")


thread = threading.Thread(target=prefetch)
thread.start()
thread.join()
if RANK == 2:
    sys.exit(5)
sleep_until_stopped()
