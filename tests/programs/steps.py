"""Report a step after each pause: ``steps.py PAUSE_S [SLOW_RANK [SLOW_PAUSE_S]]``, until the sign ``go``.

Each rank makes the sign ``stepping-RANK`` with its pid after the second step. A rank waits in a function that has its own name.
"""

import os
import sys
import time

import survivor
from signs import sign

survivor.hold()
rank = int(os.environ["RANK"])
pause_s, slow = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1
slow_pause_s = float(sys.argv[3]) if len(sys.argv) > 3 else 4 * pause_s
pipe = int(os.environ["DISTLAUNCH_PROGRESS_FD"])


def load_batch():
    time.sleep(slow_pause_s)


def compute():
    time.sleep(pause_s)


step = 0
while not os.path.exists("go"):
    (load_batch if rank == slow else compute)()
    step += 1
    os.write(pipe, b'{"step": %d, "loss": %f}\n' % (step, 1 / step))
    if step == 2:
        sign(f"stepping-{rank}", str(os.getpid()))
