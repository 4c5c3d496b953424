"""Run in a small file system: fill it through the log, free it again (FILLER is removed), until the log goes on.

Rank 0 alone writes; ``stay`` as the second word leaves the disk full.
"""

import os
import sys
import time

import survivor

survivor.hold()
filler, freed = sys.argv[1], sys.argv[2] == "free"
rank = os.environ["RANK"]
log = os.path.join(os.environ["DISTLAUNCH_RUN_DIR"], "attempt-0", f"rank-{rank}.log")
for number in range(3000):
    os.write(1, b"%d %d " % (int(rank), number) + b"d" * 200 + b"\n")
if rank == "0" and freed:
    while os.statvfs(filler).f_bavail:  # until the launcher has met the end of the disk
        os.write(1, b"more " + b"d" * 200 + b"\n")
        time.sleep(0.002)
    stuck = os.path.getsize(log)
    os.unlink(filler)
    while os.path.getsize(log) <= stuck:
        os.write(1, b"after the disk was full\n")
        time.sleep(0.05)
os.write(1, b"the last line of %d\n" % int(rank))
