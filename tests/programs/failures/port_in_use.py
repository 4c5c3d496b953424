# expect-rank: 3
# expect-exit: 1
# expect-cause: Address already in use
# expect-hint: port
# expect-frame: port_in_use.py:18 in serve
"""A second server wants a port that is taken."""

import socket

from _group import RANK, sleep_until_stopped


def serve() -> None:
    first = socket.socket()
    first.bind(("127.0.0.1", 0))
    first.listen()
    second = socket.socket()
    second.bind(first.getsockname())


if RANK == 3:
    serve()
sleep_until_stopped()
