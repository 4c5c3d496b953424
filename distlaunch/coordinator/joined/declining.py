"""A launcher that cannot take part tells node 0 why, so that the others do not wait for it."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from distlaunch.core.agent import connect
from distlaunch.core.errors import LaunchError
from distlaunch.core.protocol import remote as r
from distlaunch.core.protocol.codec import encode
from distlaunch.core.protocol.handshake import Party
from distlaunch.planning.rendezvous import Rendezvous
from distlaunch.transport.connection import Link
from distlaunch.transport.tcp_connection import TcpLink

BOUND_S = 2.0
"""How long calling, and telling, may take: node 0 may be about to start, or may never be there."""
_LONGEST = 4000


def decline(
    rendezvous: Rendezvous,
    party: Party,
    *,
    host: str,
    why: str,
    otherwise: Callable[[], Sequence[str]] | None = None,
) -> None:
    """Call node 0, and say why this launcher, on ``host``, ends; in vain where it is not there in time.

    ``otherwise``: see ``calling.call``. A launcher without a number of its own takes nobody's place for that, and node
    0 has nobody to tell.
    """
    if not rendezvous.rank:
        return
    try:
        connection, _ = connect.call(
            rendezvous.host,
            rendezvous.ports,
            party=party,
            rank=rendezvous.rank,
            own_host=host,
            instance=os.urandom(16).hex(),
            until=time.monotonic() + BOUND_S,
            otherwise=otherwise,
        )
    except LaunchError:
        return
    leave(TcpLink(connection, "node 0"), why)


def leave(link: Link, why: str) -> None:
    """Tell node 0, which has let this launcher in, why it ends; close the link once it has heard, or after 2 s."""
    until = time.monotonic() + BOUND_S
    poll = select.poll()
    poll.register(link.fileno(), select.POLLIN)
    with suppress(OSError):
        link.send(encode(r.Ending(why=why[:_LONGEST])))
        while link.receive() is not None and (left_s := until - time.monotonic()) > 0:
            poll.poll(left_s * 1000)
    link.close()
