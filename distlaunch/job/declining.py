"""Layer job: a launcher that cannot take part tells node 0 why, so that the others do not wait for it."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress

from distlaunch.core.agent import calling
from distlaunch.core.errors import LaunchError
from distlaunch.core.wire import remote as r
from distlaunch.core.wire.codec import encode
from distlaunch.core.wire.handshake import Party
from distlaunch.resolve.rendezvous import Rendezvous

BOUND_S = 2.0
"""How long all of it may take: node 0 may be about to start, or may never be there."""
_LONGEST = 4000
_CHUNK = 4096


def decline(rendezvous: Rendezvous, party: Party, *, host: str, why: str) -> None:
    """Call node 0, and say why this launcher, on ``host``, ends; in vain where it is not there in time.

    A launcher without a number of its own takes nobody's place for that, and node 0 has nobody to tell.
    """
    if not rendezvous.rank:
        return
    until = time.monotonic() + BOUND_S
    try:
        connection, _ = calling.call(
            rendezvous.host,
            rendezvous.ports,
            party=party,
            rank=rendezvous.rank,
            own_host=host,
            instance=os.urandom(16).hex(),
            until=until,
        )
    except LaunchError:
        return
    with connection, suppress(OSError):
        connection.settimeout(max(0.1, until - time.monotonic()))
        connection.sendall(encode(r.Ending(why=why[:_LONGEST])), socket.MSG_NOSIGNAL)
        while connection.recv(_CHUNK) and time.monotonic() < until:  # it closes the connection once it has heard
            pass
