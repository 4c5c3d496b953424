"""Meet all others at the master's port and say so; the first attempt then stays (deaf to SIGTERM,
if told ``deaf``).

Meeting is what a training does first, and what a node that is half gone cannot take part in.
"""

import os
import signal
import socket
import sys
import time

import common

if sys.argv[1:] == ["deaf"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
common.stamp("start", common.STARTED_NS)
place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if common.RANK == 0:
    common.stamp("world", common.WORLD_SIZE)
    with socket.create_server(place, reuse_port=True) as server:
        others = [server.accept()[0] for _ in range(common.WORLD_SIZE - 1)]
    for other in others:
        other.sendall(b"!")
else:
    while True:
        try:
            with socket.create_connection(place) as master:
                assert master.recv(1) == b"!"
            break
        except OSError:
            time.sleep(0.005)
common.stamp("met", time.monotonic_ns())
while common.ATTEMPT == 0:
    signal.pause()
