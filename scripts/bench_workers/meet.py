"""Connect to all other workers at the master's port and stamp that. The first attempt then stays;
with ``ignore-signals`` it ignores SIGTERM.

A training connects first, too, and a node that is half gone cannot.
"""

import os
import signal
import socket
import sys
import time

import common

if sys.argv[1:] == ["ignore-signals"]:
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
