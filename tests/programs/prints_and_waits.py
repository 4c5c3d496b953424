"""Print numbered lines, then wait for the sign ``go``: ``prints_and_waits.py LINES [CODE]``. Ends with CODE on attempt 0."""

import os
import sys

from signs import await_sign, sign

rank, attempt = os.environ["RANK"], int(os.environ["DISTLAUNCH_ATTEMPT"])
for number in range(int(sys.argv[1])):
    print(f"attempt {attempt} rank {rank} line {number}", flush=True)
sign(f"printed-{attempt}-{rank}", str(os.getpid()))
await_sign("go" if attempt == 0 else f"go-{attempt}")
print(f"attempt {attempt} rank {rank} ends", flush=True)
sys.exit(int(sys.argv[2]) if attempt == 0 and len(sys.argv) > 2 else 0)
