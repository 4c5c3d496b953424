"""Report steps on the progress descriptor, as told: ``reports.py [--upto N] [--then HOW] [--quiet]``.

Each rank reports steps 1 to N with a sign ``reported-<rank>`` after the last, then: ``end``, ``fail``, or ``wait`` to be stopped.
``--beat`` goes on sending the last step until the sign ``enough`` is up.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

import survivor
from signs import sign

parser = argparse.ArgumentParser()
parser.add_argument("--upto", default="3", help="one for each attempt, the last also for all later ones")
parser.add_argument("--then", default="end")
parser.add_argument("--beat", action="store_true")
options = parser.parse_args()
survivor.hold()
rank, attempt = os.environ["RANK"], int(os.environ["DISTLAUNCH_ATTEMPT"])
pipe = int(os.environ["DISTLAUNCH_PROGRESS_FD"])
upto = options.upto.split(",")
last = int(upto[min(attempt, len(upto) - 1)])


def report(step):
    os.write(pipe, b'{"step": %d, "loss": %f}\n' % (step, 1 / step))


for step in range(1, last + 1):
    report(step)
sign(f"reported-{rank}", str(os.getpid()))
while options.beat and not os.path.exists("enough"):
    report(last)
    time.sleep(0.05)
if options.then == "fail":
    raise RuntimeError("asked to")
if options.then == "wait":
    signal.pause()
sys.exit(0)
