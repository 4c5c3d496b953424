"""Counts steps, on from where the attempt before came to, until it is ended or SIGN_DIR/enough is there.

Each worker has a child, and a daemon that has cut all ties. Rank 0 keeps the step in SIGN_DIR/step, as a checkpoint on a
file system of all hosts; what each is told of its place is in SIGN_DIR/attempt-K/RANK, as JSON. With SIGN_DIR/fail there,
rank 0 moves it away and fails. ``ignore-signals`` workers do not obey TERM; ``slow`` ones take a second to.
"""

import json
import os
import signal
import subprocess
import sys
import time

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ATTEMPT = os.environ["DISTLAUNCH_ATTEMPT"]
SIGN_DIR = os.environ["SIGN_DIR"]
HERE = os.path.join(SIGN_DIR, f"attempt-{ATTEMPT}")
STEP = os.path.join(SIGN_DIR, "step")
ENOUGH, FAIL = os.path.join(SIGN_DIR, "enough"), os.path.join(SIGN_DIR, "fail")


def write(path, text):
    with open(f"{path}.new", "w") as file:
        file.write(text)
    os.replace(f"{path}.new", path)


if "ignore-signals" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "slow" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), os._exit(0)))
subprocess.Popen(["sleep", "1000"])
subprocess.Popen(["env", "-i", "setsid", "sh", "-c", "sleep 1001 & sleep 1002"])
os.makedirs(HERE, exist_ok=True)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR")
step = int(open(STEP).read()) if os.path.exists(STEP) else 0
message = {name: os.environ[name] for name in names}
write(
    os.path.join(HERE, str(RANK)), json.dumps({"host": os.uname().nodename, "step": step, "pid": os.getpid(), **message})
)
while sum(not name.endswith(".new") for name in os.listdir(HERE)) < WORLD:
    time.sleep(0.01)
print(f"attempt {ATTEMPT} of {WORLD} workers is up, at step {step}", flush=True)
while not os.path.exists(ENOUGH):
    time.sleep(0.02)
    if RANK == 0:
        step += 1
        write(STEP, str(step))
        if os.path.exists(FAIL):
            os.rename(FAIL, f"{FAIL}-done")
            sys.exit("asked to fail")
    if "chats" in sys.argv:
        print(f"step {step} of rank {RANK}", flush=True)
