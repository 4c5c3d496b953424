# expect-rank: 2
# expect-exit: 1
# expect-cause: ValueError: bad batch
# expect-frame: traceback_then_slow_exit.py:20 in step
"""Rank 2 raises and its interpreter takes half a second to end; rank 1 dies meanwhile."""

import atexit
import os
import signal
import time
from pathlib import Path

from _group import RANK, sleep_until_stopped

MARK = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent / "raised"


def step() -> None:
    if RANK == 2:
        raise ValueError("bad batch")


def leave_later() -> None:
    MARK.touch()


if RANK == 2:
    atexit.register(time.sleep, 5)
    atexit.register(leave_later)
step()
if RANK == 1:
    while not MARK.exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
sleep_until_stopped()
