"""End with 0 and leave a process that goes on: ``uploads.py [--ranks 0] [--ignore] [--fail CODE]``.

That process puts up ``uploading-<rank>`` with its pid, then waits for the sign ``go``, puts up ``uploaded-<rank>`` and
ends. TERM ends it with ``got-TERM-<rank>``; with ``--ignore`` it takes no TERM.
``--wait``: other ranks end at the sign ``end``, not at once. ``--track``: use shared memory of multiprocessing as well.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

import survivor
from signs import await_sign, sign

parser = argparse.ArgumentParser()
parser.add_argument("--ranks", default="0")
parser.add_argument("--ignore", action="store_true")
parser.add_argument("--wait", action="store_true")
parser.add_argument("--track", action="store_true")
parser.add_argument("--fail", type=int, default=0)
options = parser.parse_args()
rank = os.environ["RANK"]
survivor.hold()


def on_term(*_):
    with open(f"terms-{rank}", "a") as file:
        file.write("TERM\n")
    if not options.ignore:
        sign(f"got-TERM-{rank}")
        os._exit(0)


def upload():
    os.setsid()
    signal.signal(signal.SIGTERM, on_term)
    sign(f"uploading-{rank}", str(os.getpid()))
    await_sign("go")
    print(f"rank {rank} has uploaded", flush=True)
    sign(f"uploaded-{rank}")
    os._exit(0)


if options.track:
    from multiprocessing.shared_memory import SharedMemory

    memory = SharedMemory(create=True, size=100)
    memory.close()
    memory.unlink()
if rank in options.ranks.split(","):
    if os.fork() == 0:
        upload()
    await_sign(f"uploading-{rank}")
elif options.wait:
    await_sign("end")
sys.stdout.flush()
os._exit(options.fail)
