"""Print at TERM, then put up ``saved-<rank>``, as a script that says that it saves before it does.

The word is how many bytes to print. ``ready-<rank>`` is put up once TERM is handled.
"""

from __future__ import annotations

import os
import signal
import sys

import survivor
from signs import sign

rank = os.environ["RANK"]
size = int(sys.argv[1])
survivor.hold()


def save(_number, _frame):
    line = f"saving {rank}".ljust(63, ".")
    for _ in range(size // 64):
        print(line)
    print(f"saved {rank}", flush=True)
    print(f"done {rank}", file=sys.stderr, flush=True)
    sign(f"saved-{rank}")
    sys.exit(0)


signal.signal(signal.SIGTERM, save)
print("begun", flush=True)
sign(f"ready-{rank}", str(os.getpid()))
while True:
    signal.pause()
