"""Signal the parent: ``signals_parent.py NAME RANK``. All ranks put up ``got-<name>-<rank>`` at TERM, USR1 and USR2.

At USR1 and USR2 they go on, at TERM they end with 0. ``ready-<rank>`` is put up before; the rank then waits for the
sign ``tell``.
"""

from __future__ import annotations

import os
import signal
import sys

import survivor
from signs import await_sign, sign

name, teller = sys.argv[1:]
rank = os.environ["RANK"]
survivor.hold()
for each in ("TERM", "USR1", "USR2"):
    signal.signal(
        getattr(signal, f"SIG{each}"),
        lambda _n, _f, each=each: (sign(f"got-{each}-{rank}"), os._exit(0) if each == "TERM" else None),
    )
sign(f"ready-{rank}", str(os.getpid()))
if rank == teller:
    await_sign("tell")
    os.kill(os.getppid(), getattr(signal, f"SIG{name}"))
while True:
    signal.pause()
