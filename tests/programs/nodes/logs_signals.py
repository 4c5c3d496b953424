"""Write variables to SIGN_DIR/ATTEMPT-RANK as JSON, then a line for each signal and for the end.

SIGN_DIR/enough ends the worker with 0, SIGN_DIR/fail-ATTEMPT-RANK with 7, TERM after a moment for saving. With ``leaves`` USR1 also ends it with 0.
It has a child, and a daemon in a session of its own.
"""

import json
import os
import signal
import subprocess
import sys
import time

SIGN_DIR, RANK, ATTEMPT = os.environ["SIGN_DIR"], os.environ["RANK"], os.environ["DISTLAUNCH_ATTEMPT"]
names = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES"),
    *("DISTLAUNCH_TOKEN", "TORCHELASTIC_RESTART_COUNT", "SLURM_NTASKS", "SLURM_JOB_ID"),
)
got = []
signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
signal.signal(signal.SIGUSR2, lambda number, _: got.append(number))
signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
subprocess.Popen(["sleep", "1000"])
subprocess.Popen(["env", "-i", "setsid", "sh", "-c", "sleep 1001 & sleep 1002"])
path = os.path.join(SIGN_DIR, f"{ATTEMPT}-{RANK}")
with open(f"{path}.new", "w", buffering=1) as log:
    log.write(json.dumps({name: os.environ.get(name) for name in names}) + "\n")
    os.rename(f"{path}.new", path)
    while not os.path.exists(os.path.join(SIGN_DIR, "enough")):
        time.sleep(0.02)
        if os.path.exists(os.path.join(SIGN_DIR, f"fail-{ATTEMPT}-{RANK}")):
            sys.exit(7)
        while got:
            number = got.pop(0)
            log.write(f"{signal.Signals(number).name}\n")
            if number == signal.SIGTERM or (number == signal.SIGUSR1 and "leaves" in sys.argv):
                time.sleep(0.5)
                log.write("saved\n")
                sys.exit(0)
