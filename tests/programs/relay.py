"""Carry bytes between stdin/stdout and a TCP port: what a ProxyCommand does."""

import os
import select
import socket
import sys

peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
while True:
    ready, _, _ = select.select([0, peer], [], [])
    if 0 in ready:
        data = os.read(0, 65536)
        if not data:
            break
        peer.sendall(data)
    if peer in ready:
        data = peer.recv(65536)
        if not data:
            break
        while data:
            data = data[os.write(1, data) :]
