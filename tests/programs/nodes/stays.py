"""Stays, with a child and a daemon that has cut all ties, until it is ended; ``ignore-signals`` workers obey neither TERM nor INT.

Arguments: ``ignore-signals``, and for one rank what it does once all are there (a file for each says so): ``1=exit:3``.
"""

import os
import signal
import subprocess
import sys
import time

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SIGN_DIR = os.path.join(os.environ["SIGN_DIR"], os.environ["DISTLAUNCH_ATTEMPT"])

if "ignore-signals" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen(["sleep", "1000"])
subprocess.Popen(["env", "-i", "setsid", "sh", "-c", "sleep 1001 & sleep 1002"])
os.makedirs(SIGN_DIR, exist_ok=True)
open(os.path.join(SIGN_DIR, str(RANK)), "w").close()
while len(os.listdir(SIGN_DIR)) < WORLD:
    time.sleep(0.01)
print("all are here", flush=True)
for word in sys.argv[1:]:
    rank, _, what = word.partition("=")
    if rank == str(RANK):
        kind, _, value = what.partition(":")
        if kind == "exit":
            sys.exit(int(value))
        raise RuntimeError(value)
while True:
    time.sleep(1000)
