"""Ranks that wait in a collective: ``collective.py HOW``. The others wait for rank 1.

HOW: ``sleeps``: it sleeps, while the others report and write from a thread. ``ends``: it
ends with 0. In a second attempt, all end with 0.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import SimpleNamespace

import survivor

from distlaunch.toolkit import heartbeat

survivor.hold()
rank, how = os.environ["RANK"], sys.argv[1]
never = threading.Lock()
never.acquire()
store = SimpleNamespace(wait=never.acquire)  # native code without a frame, as torch's


def chatter():
    while True:
        heartbeat(gpu=0.5)
        print("gpu 50 %", flush=True)
        time.sleep(0.2)


def stuck():
    time.sleep(600)


heartbeat(step=7)
if os.environ["DISTLAUNCH_ATTEMPT"] == "1" or (how == "ends" and rank == "1"):
    sys.exit(0)
if rank == "1":
    stuck()
if how == "sleeps":
    threading.Thread(target=chatter, daemon=True).start()
store.wait()
