"""Hang: ``hangs.py HOW``. Rank 1 does so in ``stuck``; the others wait for it in ``others_wait``.

HOW: ``sleep``, ``lock``, ``loop``, ``stop`` (by SIGSTOP), ``child`` (waits for a child), ``deaf`` (ignores TERM).
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
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    elif how == "child":
        subprocess.run(["sleep", "600"])
    elif how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)


def others_wait():
    while True:
        time.sleep(0.5)


if os.environ["RANK"] == "1":
    stuck()
else:
    others_wait()
