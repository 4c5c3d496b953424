"""A worker with TF_CONFIG: listens on its own port, and connects to the ports of all others.

It prints its configuration, and which of these ports another process on this machine could have taken meanwhile.
"""

import json
import os
import select
import socket
import sys
import time

import survivor

LONG_S = 60.0
survivor.hold()
config = json.loads(os.environ["TF_CONFIG"])
cluster = [*config["cluster"].get("chief", ()), *config["cluster"].get("worker", ())]
kind, index = config["task"]["type"], config["task"]["index"]
reported = {"rank": int(os.environ["RANK"]), "config": config, "attempt": int(os.environ["DISTLAUNCH_ATTEMPT"])}
until = time.monotonic() + LONG_S


def is_free(port: int) -> bool:
    with socket.socket() as other:
        try:
            other.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def exchange(address: str) -> str:
    host, _, port = address.rpartition(":")
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=LONG_S) as connection:
                connection.sendall(b"%d\n" % reported["rank"])
                return connection.makefile().readline().strip()
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


reported["free"] = [address for address in cluster if is_free(int(address.rpartition(":")[2]))] if "local" in sys.argv else []
if kind != "evaluator":
    own = cluster[0 if kind == "chief" else index + len(config["cluster"].get("chief", ()))]
    with socket.socket(socket.AF_INET6) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("::", int(own.rpartition(":")[2])))
        server.listen()
        if os.fork() == 0:
            for _ in cluster:
                ready, _, _ = select.select([server], [], [], LONG_S)
                assert ready
                with server.accept()[0] as connection:
                    connection.makefile().readline()
                    connection.sendall(own.encode() + b"\n")
            os._exit(0)
        reported["met"] = [exchange(address) for address in cluster]
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
print(json.dumps(reported), flush=True)
if "fail" in sys.argv and reported["attempt"] == 0:
    sys.exit(7)
