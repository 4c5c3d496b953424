"""Run with the log in a small file system: fill it up, and with ``free`` as second word make room until the log goes on.

``stay`` lets all ranks write and the disk stay full; with ``free`` rank 0 writes alone, then removes the file FILLER.
"""

import os
import sys
import time

import survivor

survivor.hold()
filler, freed = sys.argv[1], sys.argv[2] == "free"
rank = int(os.environ["RANK"])
log = os.path.join(os.environ["DISTLAUNCH_RUN_DIR"], "attempt-0", f"rank-{rank}.log")
if not freed or rank == 0:
    for number in range(3000):
        os.write(1, b"%d %d " % (rank, number) + b"d" * 200 + b"\n")
if freed and rank == 0:
    while os.statvfs(filler).f_bavail or os.path.getsize(log) % 4096:  # until its last page is full as well
        os.write(1, b"more\n")
        time.sleep(0.002)
    stuck = os.path.getsize(log)
    os.unlink(filler)
    while os.path.getsize(log) <= stuck:
        os.write(1, b"after the disk was full\n")
        time.sleep(0.05)
os.write(1, b"the last line of %d\n" % rank)
