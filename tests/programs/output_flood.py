"""Rank 0 floods a stream until nobody takes its bytes, then says so; the others do ACT (exit with this code | wait).

It counts as blocked when its pipe has had no room for half a second. Then it goes on, blocking, for ever.
"""

import os
import select
import signal
import sys
import time

import survivor

survivor.hold()
act = sys.argv[1]
stream = int(sys.argv[2]) if len(sys.argv) > 2 else 1
full = os.path.join(os.environ["DISTLAUNCH_RUN_DIR"], "full")
if os.environ["RANK"] == "0":
    lines = (b"f" * 99 + b"\n") * 40
    os.set_blocking(stream, False)
    poller = select.poll()
    poller.register(stream, select.POLLOUT)
    while poller.poll(500):
        os.write(stream, lines)
    open(full, "w").close()
    os.set_blocking(stream, True)
    while True:
        os.write(stream, lines)
while not os.path.exists(full):
    time.sleep(0.01)
if act == "wait":
    signal.pause()
sys.exit(int(act))
