"""Layer resolve: at which address the nodes of a job meet, and by which of their interfaces; pure."""

from __future__ import annotations

from collections.abc import Mapping

from distlaunch.core.model.record import Record


class Meeting(Record):
    """Where the workers meet."""

    address: str
    """Of rank 0's node, numeric where it was not given by the user; every other node has connected to it."""
    env: Mapping[int, Mapping[str, str]]
    """By node rank: the variables that this node's workers need for it (GLOO_SOCKET_IFNAME, ...)."""
