"""Rank 0 floods a stream for ever; the others do ACT (exit CODE | wait) once rank 0's file holds BYTES.

By then the launcher's buffer and the pipe behind it are full: BYTES is chosen larger than both.
"""

import os
import signal
import sys
import time

import survivor

survivor.hold()
act, size = sys.argv[1], int(sys.argv[2])
stream = int(sys.argv[3]) if len(sys.argv) > 3 else 1
mine = os.environ["RANK"]
attempt = os.environ["DISTLAUNCH_ATTEMPT"]
log = os.path.join(os.environ["DISTLAUNCH_RUN_DIR"], f"attempt-{attempt}", "rank-0.log")
if mine == "0":
    line = b"f" * 99 + b"\n"
    while True:
        os.write(stream, line * 40)
while not os.path.exists(log) or os.path.getsize(log) < size:
    time.sleep(0.01)
if act == "wait":
    open(os.path.join(os.environ["DISTLAUNCH_RUN_DIR"], "full"), "w").close()
    signal.pause()
sys.exit(int(act))
