"""End as told, differently in each attempt: ``ends.py [--ignore] [--rank R] HOW_IN_ATTEMPT_0 HOW_IN_ATTEMPT_1 …``; the last one also for all later attempts.

HOW: a number (exit code), a signal's name, ``raise-a`` or ``raise-b`` (from different lines), ``import``, ``usage``, ``consequence`` (after it rank 0 fails by itself, with 7), ``ok`` (all ranks exit 0).
The ending rank waits until the others are ready; these wait to be stopped, and ignore TERM with ``--ignore``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys

import survivor
from signs import await_sign, sign

parser = argparse.ArgumentParser()
parser.add_argument("--ignore", action="store_true")
parser.add_argument("--rank", type=int, default=0)
parser.add_argument("hows", nargs="+")
options = parser.parse_args()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = int(os.environ["DISTLAUNCH_ATTEMPT"])
how = options.hows[min(attempt, len(options.hows) - 1)]
survivor.hold()
print(f"attempt {attempt} rank {rank}")


def tell():
    sign(
        f"attempt-{attempt}-rank-{rank}",
        json.dumps({"pid": os.getpid(), "env": dict(os.environ), "older": older_alive()}),
    )


def older_alive():
    """Pids of workers of earlier attempts that still exist."""
    found = []
    for name in os.listdir("."):
        if name.startswith("attempt-") and not name.startswith(f"attempt-{attempt}-"):
            with open(name) as file:
                pid = json.load(file)["pid"]
            if os.path.exists(f"/proc/{pid}"):
                found.append(pid)
    return found


def raise_a():
    raise RuntimeError("asked to")


def raise_b():
    raise RuntimeError("asked to")


if rank == 0:
    listener = socket.socket(socket.AF_INET6)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("::", int(os.environ["MASTER_PORT"])))
    listener.listen()

if how == "ok":
    tell()
    sys.exit(0)
if rank != options.rank:
    if options.ignore:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell()
    if how == "consequence" and rank == 0:
        await_sign("go")
        sys.exit(7)
    while True:
        signal.pause()
for other in range(world):
    if other != rank:
        await_sign(f"attempt-{attempt}-rank-{other}")
tell()
if how.isdigit():
    sys.exit(int(how))
if how == "raise-a":
    raise_a()
if how == "raise-b":
    raise_b()
if how == "import":
    import module_that_nobody_has  # noqa: F401
if how == "usage":
    argparse.ArgumentParser().error("--steps is missing")
if how == "consequence":
    raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
if how != "KILL":
    signal.signal(getattr(signal, f"SIG{how}"), signal.SIG_DFL)  # Python ignores PIPE
os.kill(os.getpid(), getattr(signal, f"SIG{how}"))
signal.pause()
