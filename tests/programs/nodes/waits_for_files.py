"""Write variables to SIGN_DIR/ready-ATTEMPT-RANK as JSON, and run until SIGN_DIR/end-ATTEMPT or SIGN_DIR/fail-ATTEMPT-RANK exists.

The worker has a child, and a daemon in a session of its own. With ``ignore-signals`` it ignores TERM and INT; each USR1 adds a byte to
SIGN_DIR/usr1-RANK.
"""

import json
import os
import signal
import subprocess
import sys
import time

SIGN_DIR, RANK, ATTEMPT = os.environ["SIGN_DIR"], os.environ["RANK"], os.environ["DISTLAUNCH_ATTEMPT"]


def note(_signum, _frame):
    with open(os.path.join(SIGN_DIR, f"usr1-{RANK}"), "ab") as file:
        file.write(b".")


signal.signal(signal.SIGUSR1, note)
signal.signal(signal.SIGINT, signal.SIG_DFL)
if "ignore-signals" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen(["sleep", "1000"])
subprocess.Popen(["env", "-i", "setsid", "sh", "-c", "sleep 1001 & sleep 1002"])
names = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"),
    *("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "DISTLAUNCH_JOB_ID", "DISTLAUNCH_RUN_DIR", "DISTLAUNCH_TOKEN"),
)
reported = {name: os.environ.get(name) for name in names}
reported |= {"host": os.uname().nodename, "pid": os.getpid(), "parent": os.getppid()}
path = os.path.join(SIGN_DIR, f"ready-{ATTEMPT}-{RANK}")
with open(f"{path}.new", "w") as file:
    json.dump(reported, file)
os.rename(f"{path}.new", path)
print(f"rank {RANK} is here", flush=True)
while not os.path.exists(os.path.join(SIGN_DIR, f"end-{ATTEMPT}")):
    time.sleep(0.02)
    if os.path.exists(os.path.join(SIGN_DIR, f"fail-{ATTEMPT}-{RANK}")):
        sys.exit(7)
