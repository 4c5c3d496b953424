"""At which address the nodes of a job meet, and by which of their interfaces; pure.

The master's node names its addresses, all others try to connect to it there, and the first that
every one has reached is taken: no name is trusted to lead to the right machine (127.0.1.1), and no
name of an interface to its network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from distlaunch.core.errors import ConfigError, NodesError
from distlaunch.core.model.host_list import name_hosts
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import counted, printable, quoted
from distlaunch.core.model.variables import SET_FOR_NODES
from distlaunch.core.protocol.agent_messages import Interface, Reached, Route, Surveyed
from distlaunch.planning.backend import PlannedBackend

_GLOO, _TENSORPIPE, _NCCL = SET_FOR_NODES
_BRIDGES = (
    "docker", "br-", "virbr", "lxcbr", "lxdbr", "podman", "cni", "flannel", "cali", "cilium", "veth", "vnet", "kube",
    "nerdctl", "vmnet", "vboxnet", "weave", "dummy",
)  # fmt: skip
"""Networks within one machine, whose addresses are the same on many."""
_NOT_FOR_NCCL = ("lo", "docker")
_TUNNELS = ("tun", "tap", "wg", "tailscale", "zt", "ppp", "utun")
_LONGEST_NAME = 15
"""Bytes of an interface's name: IFNAMSIZ of the kernel, less the zero at its end."""
_SHOWN = 8


class Meeting(Record):
    """Where the workers meet."""

    address: str
    """Of rank 0's node, numeric where it was not given by the user; every other node has connected
    to it."""
    env: Mapping[int, Mapping[str, str]]
    """By node rank: the variables that this node's workers need for it (GLOO_SOCKET_IFNAME,
    ...)."""
    addresses: tuple[str, ...] = ()
    """By node rank: rank 0's, and of the others the end of the way by which they have reached
    it."""


def check_interface(text: str, who: str = "--interface") -> None:
    """Refuse what is neither the name of an interface nor a network. Raises ConfigError."""
    hint = "the name that ip addr shows (eth0, ib0), or a network (10.1.0.0/16)"
    if "/" in text or ":" in text:
        if _network(text) is None:
            raise ConfigError(f"{who} {quoted(text)}: no network", hint=hint)
    elif text.replace(".", "").isdecimal() and text.count(".") > 1:
        raise ConfigError(
            f"{who} {quoted(text)}: an address is no network", hint=f"{text}/32, or {hint}"
        )
    elif len(text.encode(errors="surrogateescape")) > _LONGEST_NAME or any(
        c.isspace() for c in text
    ):
        raise ConfigError(f"{who} {quoted(text)}: no name of an interface", hint=hint)


def addresses(
    surveyed: Surveyed,
    host: str,
    *,
    interface: str | None,
    given: str | None,
    of_scheduler: Sequence[str] = (),
) -> tuple[str, ...]:
    """Give the addresses at which the others may reach a node, best first; ``given`` alone, if the
    user gave it.

    ``host`` is how the list of hosts names it. ``of_scheduler`` are the addresses by which the
    scheduler reaches it: they come after those of the node's own name. Raises ConfigError if it has
    no such interface, or none at all.
    """
    if given is not None:
        return (given,)
    candidates = _of_interface(surveyed, host, interface)
    if interface is not None:
        of_scheduler = ()
    if not candidates and not of_scheduler:
        raise ConfigError(
            f"{printable(host)} has no address by which other nodes could reach it",
            hint=_what_it_has(surveyed),
        )
    places: dict[str, int] = {}
    for address in (*surveyed.named, *of_scheduler):
        places.setdefault(address, len(places))

    def rank(each: Interface) -> tuple[object, ...]:
        return (
            each.address != host,
            _kind(each.name),
            places.get(each.address, len(places)),
            ":" in each.address,
        )

    return tuple(
        dict.fromkeys((*(each.address for each in sorted(candidates, key=rank)), *of_scheduler))
    )


def usable_by(backend: PlannedBackend, found: tuple[str, ...], host: str) -> tuple[str, ...]:
    """Leave out what the workers of a backend that needs IPv4 cannot reach. Raises ConfigError if
    nothing is left."""
    if not backend.ipv4_only:
        return found
    left = tuple(address for address in found if ":" not in address)
    if found and not left:
        raise ConfigError(
            f"{backend.ipv4_only}, and of {printable(host)} there is {', '.join(found)}",
            hint="--interface NAME|CIDR chooses a network that has IPv4, --master-addr HOST an "
            "address",
        )
    return left


def led_astray(surveys: Sequence[Surveyed], hosts: Sequence[str]) -> dict[str, str]:
    """Give the nodes whose own name leads to a loopback address, and to which; none where all are
    one machine."""
    named = {host: _own_name(surveyed) for surveyed, host in zip(surveys, hosts, strict=True)}
    machines = {frozenset(each.address for each in surveyed.interfaces) for surveyed in surveys}
    if len(machines) == 1:
        return {}
    return {
        host: address
        for host, address in named.items()
        if address is not None and _is_loopback(address)
    }


def meet(
    surveys: Sequence[Surveyed],
    reached: Mapping[int, Reached],
    *,
    tried: Sequence[str],
    hosts: Sequence[str],
    interface: str | None = None,
    set_by_user: Mapping[str, str] | None = None,
    nccl: bool = True,
) -> Meeting:
    """Settle on the first of the addresses ``tried`` that every node but the first has reached.

    All by node rank; ``hosts`` is what they are called. ``set_by_user``: the variables that workers
    have anyway; ``nccl``: they may use it. Raises NodesError that names who cannot reach whom,
    ConfigError for an interface that a node has not.
    """
    ranks = range(1, len(surveys))
    ways = {
        rank: {route.address: route for route in _routes(reached, rank, tried)} for rank in ranks
    }
    address = next(
        (each for each in tried if all(each in routes for routes in ways.values())), None
    )
    if address is None:
        raise _cannot_meet(surveys, reached, tried, hosts)
    taken = set_by_user or {}
    env: dict[int, Mapping[str, str]] = {}
    shared: dict[tuple[tuple[str, str], ...], Mapping[str, str]] = {}
    others = [routes[address].local for routes in ways.values()]
    for rank, surveyed in enumerate(surveys):
        near = ways[rank][address].local if rank else _own(surveyed, address, others)
        name = ways[rank][address].interface if rank else ""
        wanted = dict(_wanted(surveyed, hosts[rank], near, name, interface, nccl=nccl))
        left = {
            key: value
            for key, value in wanted.items()
            if key not in taken and not surveyed.environ.get(key)
        }
        if left:
            env[rank] = shared.setdefault(tuple(left.items()), left)
    return Meeting(address=address, env=env, addresses=(address, *others))


# --- interfaces


def _usable(surveyed: Surveyed) -> Iterator[Interface]:
    """Give those of a node's addresses that another machine may reach."""
    for each in surveyed.interfaces:
        address = each.address.lower()
        link_local = address.startswith("169.254.") or address[:3] in {"fe8", "fe9", "fea", "feb"}
        if not (address.startswith("127.") or address == "::1" or link_local):
            yield each


def _of_interface(surveyed: Surveyed, host: str, interface: str | None) -> list[Interface]:
    """Give a node's addresses, as far as the user wants them. Raises ConfigError if there is none
    of these."""
    usable = list(_usable(surveyed))
    if interface is None:
        return usable
    network = _network(interface) if "/" in interface or ":" in interface else None
    if network is None:
        wanted = [each for each in usable if each.name == interface]
        said = f"interface {quoted(interface)} with an address that others may reach"
    else:
        wanted = [each for each in usable if _is_within(each.address, network)]
        said = f"address in {interface}"
    if not wanted:
        raise ConfigError(
            f"--interface: {printable(host)} has no {said}", hint=_what_it_has(surveyed)
        )
    return wanted


def _kind(name: str) -> int:
    return 2 if name.startswith(_BRIDGES) else 1 if name.startswith(_TUNNELS) else 0


def _what_it_has(surveyed: Surveyed) -> str:
    usable = list(_usable(surveyed))
    listed = ", ".join(
        f"{printable(each.name)} {each.address}/{each.prefix}" for each in usable[:_SHOWN]
    )
    return (
        f"it has {listed}{', ...' * (len(usable) > _SHOWN)}"
        if listed
        else "its only addresses are its own loopback's"
    )


def _network(text: str) -> tuple[int, int, int] | None:
    """Read a network: version, its number, and bits that may differ."""
    import ipaddress

    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None
    return network.version, int(network.network_address), network.max_prefixlen - network.prefixlen


def _is_within(address: str, network: tuple[int, int, int]) -> bool:
    import ipaddress

    version, number, free = network
    try:
        own = ipaddress.ip_address(address)
    except ValueError:
        return False
    return own.version == version and int(own) >> free == number >> free


# --- what workers need


def _own(surveyed: Surveyed, address: str, others: Sequence[str]) -> str:
    """Give the master's own end: the address itself if it is one of its own, else one in the
    others' network."""
    usable = list(_usable(surveyed))
    if any(each.address == address for each in usable):
        return address
    for each in usable:
        network = _network(f"{each.address}/{each.prefix}")
        if network is not None and any(_is_within(other, network) for other in others[:1]):
            return each.address
    return usable[0].address if usable else address


def _wanted(
    surveyed: Surveyed, host: str, near: str, name: str, interface: str | None, *, nccl: bool
) -> Iterator[tuple[str, str]]:
    """Give what a node's workers would have to be told for using the interface of the ``near``
    address.

    ``name`` is that interface, where the kernel has told it. Gloo and TensorPipe take the first
    address of the host's own name that is this machine's; NCCL takes interfaces by their names, but
    no loopback's and docker's.
    """
    usable = list(_usable(surveyed))
    if interface is not None:
        wanted = _of_interface(surveyed, host, interface)
        if all(each.address != near for each in wanted):
            near, name = wanted[0].address, wanted[0].name
    name = name or next((each.name for each in usable if each.address == near), "")
    if not name:
        return
    if _own_name(surveyed) != near:
        yield _GLOO, name
        yield _TENSORPIPE, name
    if (
        nccl
        and len(
            {each.name for each in surveyed.interfaces if not each.name.startswith(_NOT_FOR_NCCL)}
        )
        > 1
    ):
        yield _NCCL, f"={name}"


def _own_name(surveyed: Surveyed) -> str | None:
    """Give the first address of the machine's own name that is its own."""
    own = {each.address for each in surveyed.interfaces}
    return next((each for each in surveyed.named if each in own or _is_loopback(each)), None)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


# --- who cannot reach whom


def _routes(reached: Mapping[int, Reached], rank: int, tried: Sequence[str]) -> Sequence[Route]:
    """Give the ways that a node has found to the addresses which it was told: no other counts."""
    return (
        [route for route in reached[rank].routes if route.address in tried]
        if rank in reached
        else ()
    )


def _cannot_meet(
    surveys: Sequence[Surveyed],
    reached: Mapping[int, Reached],
    tried: Sequence[str],
    hosts: Sequence[str],
) -> NodesError:
    master, at = printable(hosts[0]), ", ".join(tried[:_SHOWN])
    lost = [rank for rank in range(1, len(hosts)) if not _routes(reached, rank, tried)]
    if lost:
        names = name_hosts(hosts[rank] for rank in lost)
        why = next(
            (problem for rank in lost if rank in reached and (problem := reached[rank].problem)),
            None,
        )
        said = (
            f"{names} cannot connect to {master}, where rank 0 is to be, at "
            f"{at}{f': {printable(why)}' if why else ''}"
        )
        hint = (
            "a firewall may be in between: --master-port N names the port to open; --master-addr "
            "ADDRESS and"
            f" --interface NAME|CIDR choose the network; of {master}: {_what_it_has(surveys[0])}"
        )
        return NodesError(said, hint=hint)
    by = [
        f"{name_hosts(names)} by {address} only"
        for address, names in _parties(reached, tried, hosts)
    ]
    more = f", and {counted(len(by) - _SHOWN, 'other')}" if len(by) > _SHOWN else ""
    return NodesError(
        f"no address of {master}, where rank 0 is to be, is reached by all nodes: "
        f"{', '.join(by[:_SHOWN])}{more}",
        hint="--interface NAME|CIDR chooses the network that all have, --exclude leaves nodes out",
    )


def _parties(
    reached: Mapping[int, Reached], tried: Sequence[str], hosts: Sequence[str]
) -> Iterator[tuple[str, list[str]]]:
    parties: dict[str, list[str]] = {}
    for rank in range(1, len(hosts)):
        found = {route.address for route in _routes(reached, rank, tried)}
        parties.setdefault(" and ".join(each for each in tried if each in found), []).append(
            hosts[rank]
        )
    yield from parties.items()
