"""Open COUNT connections to HOST PORT and behave in a way: silent, drip, garbage, http, tls, token, stays.

Prints "up" when each has been opened once; opens those again that are closed, until stdin ends.
"""

import errno
import json
import os
import resource
import select
import socket
import struct
import sys

kind, host, port, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
needed = count + 50
if soft < needed:
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, max(needed, hard)))

fields = {
    "t": "Call",
    "version": 4,
    "release": "1.2.3",
    "job_key": "77",
    "rank": None,
    "host": "bad",
    "instance": "x",
    "nonce": "ab" * 32,
    "scrypt": True,
}
body = json.dumps(fields).encode()
CALL = struct.pack(">BII", 1, len(body), 0) + body
SAYS = {
    "silent": b"",
    "drip": CALL,
    "garbage": os.urandom(3000).replace(b"\x01", b"\xfe") or b"\xfe",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00" + bytes(512),
    "stays": CALL,
    "token": CALL,
}[kind]
if kind == "garbage":
    SAYS = b"\xff" + SAYS
PROOF = json.dumps({"t": "Proof", "proof": "0" * 64}).encode()
PROOF = struct.pack(">BII", 1, len(PROOF), 0) + PROOF

poll = select.epoll()
open_ones = {}
opened = 0


def another():
    global opened
    one = socket.socket()
    one.setblocking(False)
    try:
        one.connect((host, port))
    except BlockingIOError:
        pass
    except OSError:
        one.close()
        return
    open_ones[one.fileno()] = [one, 0, False]
    poll.register(one, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP)
    opened += 1


def leave(number):
    poll.unregister(number)
    open_ones.pop(number)[0].close()


poll.register(0, select.EPOLLIN)
is_up = False
while True:
    for _ in range(min(200, count - len(open_ones))):
        another()
    if opened >= count and not is_up:
        is_up = True
        print("up", flush=True)
    if kind == "drip":
        for number, state in list(open_ones.items()):
            if state[2] and state[1] < len(SAYS):
                try:
                    state[0].send(SAYS[state[1] : state[1] + 1])
                    state[1] += 1
                except OSError:
                    leave(number)
    for number, events in poll.poll(0.1, 1000):
        if number == 0:
            if not os.read(0, 100):
                sys.exit(0)
            continue
        state = open_ones[number]
        if events & (select.EPOLLERR | select.EPOLLHUP | select.EPOLLRDHUP):
            leave(number)
            continue
        try:
            if events & select.EPOLLOUT and not state[2]:
                state[2] = True
                poll.modify(number, select.EPOLLIN | select.EPOLLRDHUP)
                if kind != "drip":
                    state[0].send(SAYS)
            if events & select.EPOLLIN:
                data = state[0].recv(4096)
                if not data:
                    leave(number)
                elif kind == "token":
                    state[0].send(PROOF)
        except OSError as exc:
            if exc.errno != errno.EAGAIN:
                leave(number)
