"""Hang: ``hangs.py HOW``. Rank 1 does so in ``stuck``; the others wait for it in ``others_wait``.

HOW: ``sleep``, ``lock``, ``loop``, ``poll`` (looks for a file again and again), ``stop`` (by SIGSTOP), ``child`` (waits
for a child), ``ignores_term`` (ignores TERM). ``work``: no hang; rank 1 computes until there is a file ``enough``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import survivor
from signs import sign

survivor.hold()
how = sys.argv[1]


def stuck():
    sign("stuck", str(os.getpid()))
    if how == "sleep":
        time.sleep(600)
    elif how == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif how == "loop":
        while True:
            pass
    elif how == "poll":
        while not os.path.exists("never"):
            checked = time.monotonic()
            time.sleep(0.02 + checked * 0)
    elif how == "work":
        while not os.path.exists("enough"):
            sum(range(100_000))
        sys.exit(0)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    elif how == "child":
        subprocess.run(["sleep", "600"])
    elif how == "ignores_term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)


def others_wait():
    while not os.path.exists("enough"):
        time.sleep(0.5)


if os.environ["RANK"] == "1":
    stuck()
else:
    others_wait()
