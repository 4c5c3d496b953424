# workers: 3
# expect-rank: 0
# expect-exit: 1
# expect-cause: Address already in use | EADDRINUSE
# expect-frame: serve_metrics
# expect-hint: port
# misleads: --master-port
"""Rank 0 serves metrics on a port of its own choice, which the last job's exporter still has."""
import os
import socket
import threading
import time

RANK = int(os.environ["RANK"])


def exporter_of_last_job():
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server


def serve_metrics(port):
    server = socket.socket()
    server.bind(("127.0.0.1", port))
    server.listen()
    threading.Thread(target=server.accept, daemon=True).start()


def main():
    left = exporter_of_last_job()
    print(f"rank {RANK}: training starts", flush=True)
    time.sleep(0.5)
    if RANK == 0:
        serve_metrics(left.getsockname()[1])
    time.sleep(20)


main()
