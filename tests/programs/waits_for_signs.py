"""A worker of a job with several launchers: reports by a sign, then waits for a sign to end or to fail.

Signs are files in the working directory. The worker writes ``ready-<attempt>-<rank>`` (JSON), the test ``end-<attempt>`` or
``fail-<attempt>-<rank>``; each USR1 adds a byte to ``usr1-<rank>``.
"""

import json
import os
import signal
import sys
import time

import survivor

survivor.hold()
attempt, rank = os.environ["DISTLAUNCH_ATTEMPT"], os.environ["RANK"]


def note(_signum, _frame):
    with open(f"usr1-{rank}", "ab") as file:
        file.write(b".")


signal.signal(signal.SIGUSR1, note)
names = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"),
    *("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "DISTLAUNCH_JOB_ID", "DISTLAUNCH_RUN_DIR"),
)
reported = {name: os.environ[name] for name in names} | {"pid": os.getpid()}
with open(f".ready-{attempt}-{rank}", "w") as file:
    json.dump(reported, file)
os.rename(f".ready-{attempt}-{rank}", f"ready-{attempt}-{rank}")
print(f"rank {rank} is here", flush=True)
while not os.path.exists(f"end-{attempt}"):
    if os.path.exists(f"fail-{attempt}-{rank}"):
        sys.exit(7)
    time.sleep(0.02)
