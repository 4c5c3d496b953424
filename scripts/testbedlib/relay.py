"""A slow and lossy cable: carries frames between two TAP devices, each delayed, some dropped.

Run as ``relay.py NEAR FAR DELAY_S LOSS PID_FILE`` in the network namespace of the switch; it makes
the devices, goes into the background, and the devices vanish with it. The kernel has made whole
frames, with checksums, of whatever a TAP device is given, so frames can be carried as they are.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_IFF_TAP_NO_PI = 0x1002
_MOST_BYTES = 65536
_MOST_WAITING = 20000
"""Frames in one direction; further ones are dropped, as by any queue."""


def _tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP_NO_PI))
    return fd


def carry(near: int, far: int, delay_s: float, loss: float) -> None:
    """Carry frames both ways until killed; ``loss`` is a part of 1. With the same delay for all,
    order stays."""
    other = {near: far, far: near}
    waiting: deque[tuple[float, int, bytes]] = deque()
    poll = select.poll()
    for fd in other:
        poll.register(fd, select.POLLIN)
    while True:
        left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for fd, _ in poll.poll(None if left_s is None else left_s * 1000 + 0.5):
            try:
                frame = os.read(fd, _MOST_BYTES)
            except OSError:  # none there, or the device is down
                continue
            if len(waiting) < 2 * _MOST_WAITING and random.random() >= loss:
                waiting.append((time.monotonic() + delay_s, other[fd], frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, fd, frame = waiting.popleft()
            try:
                os.write(fd, frame)
            except OSError:  # the device is down, or its queue full: frames get lost
                continue


def main() -> None:
    near_name, far_name, delay_s, loss, pid_file = sys.argv[1:]
    near, far = _tap(near_name), _tap(far_name)
    if pid := os.fork():
        with open(pid_file, "w", encoding="ascii") as file:
            file.write(str(pid))
        return
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    carry(near, far, float(delay_s), float(loss))


if __name__ == "__main__":
    main()
