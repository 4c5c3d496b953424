"""Report heartbeats for a second, then rank 2 gets stuck in a function of its own and the others
wait for ever.

With ``busy SECONDS``: compute that long without output, but with heartbeats, and end well.
"""

import os
import sys
import threading
import time

import common


def report(step: int) -> None:
    os.write(int(os.environ["DISTLAUNCH_PROGRESS_FD"]), b'{"step": %d}\n' % step)


def stuck() -> None:
    while True:
        time.sleep(1000)


common.stamp("start", common.STARTED_NS)
busy = sys.argv[1:2] == ["busy"]
for step in range(int(float(sys.argv[2]) if busy else 1) * 10):
    ends = time.monotonic() + 0.1
    while time.monotonic() < ends:
        pass
    report(step)
if not busy:
    common.stamp("last", time.monotonic_ns())
    if common.RANK == 2:
        stuck()
    threading.Event().wait()  # not signal.pause(), which ends when the stacks are asked for
