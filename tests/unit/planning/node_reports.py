"""Surveys of nodes with interfaces such as ``eth0 10.0.0.1/24``, and their routes to each other."""

from __future__ import annotations

from distlaunch.core.protocol.agent_messages import Interface, Reached, Route

GLOO, TENSORPIPE, NCCL = "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
DOCKER = "docker0 172.17.0.1/16"


def interfaces(*written: str) -> tuple[Interface, ...]:
    """Read ``eth0 10.0.0.1/24``."""
    made = []
    for each in written:
        name, _, rest = each.partition(" ")
        address, _, prefix = rest.partition("/")
        made.append(Interface(name=name, address=address, prefix=int(prefix)))
    return tuple(made)


def node(make_surveyed, host, *written, named=None, **changed):
    own = interfaces(*written)
    return make_surveyed(
        host, interfaces=own, named=(own[0].address,) if named is None else named, **changed
    )


def way(address: str, local: str, interface: str = "") -> Route:
    return Route(address=address, local=local, interface=interface)


def reached(*routes: Route, problem: str | None = None) -> Reached:
    return Reached(attempt=0, routes=routes, problem=problem)
