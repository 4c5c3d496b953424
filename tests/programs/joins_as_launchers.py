"""Join HOST PORT as COUNT launchers, in any order. Print how many were admitted, then keep the connections until stdin ends."""

import os
import random
import sys
import threading
import time
import traceback

from distlaunch.core.agent.connect import connect_to_listener
from distlaunch.core.protocol.handshake import JobIdentity

host, port, count, token = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].encode() or None
PARTY = JobIdentity(release="1.2.3", job_key="77", token=token)
UNTIL = time.monotonic() + 100
kept = []
begin = threading.Event()


def one(rank):
    begin.wait()
    try:
        connection, welcome = connect_to_listener(
            host, [port], job_identity=PARTY, rank=rank, own_host=f"n{rank}", instance=str(rank), until=UNTIL
        )
        assert welcome.rank == rank
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    kept.append(connection)


threads = [threading.Thread(target=one, args=(rank,)) for rank in random.sample(range(count), count)]
for thread in threads:
    thread.start()
begin.set()
for thread in threads:
    thread.join()
print(len(kept), flush=True)
os.read(0, 1)
