"""Wait to be stopped.

``--ignore TERM,INT``  ignore these signals
``--note USR1,CONT``   put up ``got-<name>-<rank>`` at these, and go on
``--save TERM,INT``    put up ``got-<name>-<rank>``, wait for the sign ``go``, fetch data from the child if there is one, put up ``saved-<rank>``, exit 0
``--child``            have a child that serves data, as a data loader does; it puts up ``child-got-<name>-<rank>`` at TERM, INT, USR1, USR2 and ends
``--ranks 0``          all of the above only on these ranks; the others just wait
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys

import survivor
from signs import await_sign, sign

parser = argparse.ArgumentParser()
parser.add_argument("--ignore", default="")
parser.add_argument("--note", default="")
parser.add_argument("--save", default="")
parser.add_argument("--child", action="store_true")
parser.add_argument("--ranks", default=None)
options = parser.parse_args()
rank = os.environ["RANK"]
survivor.hold()


def number(name):
    return getattr(signal, f"SIG{name}")


def serve(end):
    for name in ("TERM", "INT", "USR1", "USR2"):
        signal.signal(number(name), lambda _n, _f, name=name: (sign(f"child-got-{name}-{rank}"), os._exit(0)))
    sign(f"child-{rank}", str(os.getpid()))
    while end.recv(1):
        end.send(b"!")
    os._exit(0)


server = None
if options.ranks is None or rank in options.ranks.split(","):
    if options.child:
        server, end = socket.socketpair()
        if os.fork() == 0:
            server.close()
            serve(end)
        end.close()
        await_sign(f"child-{rank}")

    def save(name):
        sign(f"got-{name}-{rank}")
        await_sign("go")
        for _ in range(20 if server else 0):
            try:
                server.send(b"?")
                alive = server.recv(1)
            except OSError:
                alive = b""
            if not alive:
                sign(f"lost-{rank}")
                sys.exit(9)
        sign(f"saved-{rank}")
        sys.exit(0)

    for name in filter(None, options.ignore.split(",")):
        signal.signal(number(name), signal.SIG_IGN)
    for name in filter(None, options.note.split(",")):
        signal.signal(number(name), lambda _n, _f, name=name: sign(f"got-{name}-{rank}"))
    for name in filter(None, options.save.split(",")):
        signal.signal(number(name), lambda _n, _f, name=name: save(name))

sign(f"ready-{rank}", str(os.getpid()))
while True:
    signal.pause()
