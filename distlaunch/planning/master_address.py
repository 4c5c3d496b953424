"""Choose the address and port at which the workers of a job find rank 0. No I/O.

Planning derives them from the options and the list of hosts. With several nodes the address is
chosen when the attempt starts: rank 0's node reports its addresses, every other node connects to
each of them, and the first address that all have reached becomes MASTER_ADDR. A name may lead to a
different machine on each node (127.0.1.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from distlaunch.core.errors import ConfigError, NodesError, UsageError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import counted, printable, quoted

if TYPE_CHECKING:
    from distlaunch.core.model.topology import Topology
    from distlaunch.core.protocol.agent_messages import Reached, Route, Surveyed
    from distlaunch.planning.allocation import Allocation, Host
    from distlaunch.planning.backend import PlannedBackend
    from distlaunch.planning.train_options import TrainOptions

AddressesOf = Callable[[str], Sequence[str]]
"""Returns the addresses by which a scheduler reaches a host, by the host's name."""
LOOPBACK = "127.0.0.1"
_UNSPECIFIED = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
"""Addresses to which only launchers on one machine can connect; no MASTER_ADDR for workers."""
_SHOWN = 8


class MasterOrigin(Enum):
    """The source of an address or a port."""

    OPTION = "the user's option"
    SYSTEM = "the system that names the nodes"
    FIRST_NODE = "the first node's name"
    ONE_NODE = "loopback, as all workers are on one node"
    START = "settled at the start"


class MasterAddress(Record):
    """Rank 0's address and port, as far as planning knows them."""

    address: str | None
    """None if it is chosen when the attempt starts."""
    port: int | None
    """None if rank 0's node chooses a free port when the attempt starts."""
    address_origin: MasterOrigin
    port_origin: MasterOrigin


class MasterChoice(Record):
    """The master address that all nodes have reached."""

    address: str
    """Address of rank 0's node: a number, unless the user has set a name."""
    env: Mapping[int, Mapping[str, str]]
    """By node rank: the variables with which the workers use the same network (GLOO_SOCKET_IFNAME,
    ...)."""
    addresses: tuple[str, ...] = ()
    """By node rank: an address of the node in the network by which it has reached rank 0's node."""


# --- planned


def planned_master(
    options: TrainOptions, topology: Topology, allocation: Allocation | None = None
) -> MasterAddress:
    """Return the planned address and port of rank 0's node.

    ``topology.master_addr`` may be an address that the system set or the first node's name;
    ``allocation`` shows which.
    """
    port, port_origin = options.master_port or topology.master_port, MasterOrigin.START
    if port is not None:
        port_origin = MasterOrigin.OPTION if options.master_port else MasterOrigin.SYSTEM
    address, origin = options.master_addr or topology.master_addr, MasterOrigin.START
    if options.master_addr:
        origin = MasterOrigin.OPTION
    elif address is not None:
        of_system = allocation is not None and allocation.master_addr == address
        origin = MasterOrigin.SYSTEM if of_system else MasterOrigin.FIRST_NODE
    elif len(topology.nodes) == 1:
        address, origin = LOOPBACK, MasterOrigin.ONE_NODE
    return MasterAddress(address=address, port=port, address_origin=origin, port_origin=port_origin)


def master_of_allocation(
    options: TrainOptions,
    allocation: Allocation,
    *,
    index: int,
    hostname: str | None,
) -> MasterAddress:
    """Return the address and port of rank 0's node by the options and the list of hosts, for
    several nodes.

    ``index`` is the index of rank 0's node in ``allocation.hosts``; the system's own address and
    port belong to index 0. ``hostname`` is this machine's name if it is rank 0's node.
    """
    from distlaunch.planning.hosts.this_host import is_loopback

    first: Host = allocation.hosts[index]
    address, origin = options.master_addr, MasterOrigin.OPTION
    if address is None and index == 0:
        address, origin = allocation.master_addr, MasterOrigin.SYSTEM
    if address is None and first.known:
        here = hostname is not None and is_loopback(first.name)
        address, origin = hostname if here else first.name, MasterOrigin.FIRST_NODE
    port = allocation.master_port if index == 0 else None
    return MasterAddress(
        address=address,
        port=port,
        address_origin=MasterOrigin.START if address is None else origin,
        port_origin=MasterOrigin.START if port is None else MasterOrigin.SYSTEM,
    )


def master_note(master: MasterAddress, options: TrainOptions) -> str | None:
    """Return a note if the planned address is not known or may not lead to rank 0's node."""
    from distlaunch.planning.hosts.this_host import is_loopback

    if options.rendezvous is not None or master.address_origin is MasterOrigin.FIRST_NODE:
        return None  # the launchers connect at the rendezvous first
    if master.address is None:
        return f"the address of rank 0's node is not known: use {Opt.MASTER_ADDR} HOST"
    if is_loopback(master.address):
        address = printable(master.address)
        return f"the master address {address} leads each of several machines to itself"
    return None


# --- the rendezvous of several launchers


def rendezvous_endpoint(options: TrainOptions) -> tuple[str | None, int | None]:
    """Return host and port of --rendezvous: HOST:PORT, HOST, [IPv6]:PORT.

    Without the option both are None, without a port the second. Raises UsageError for the option
    and ConfigError for the variable.
    """
    text, who = options.rendezvous, options.named("rendezvous")
    if text is None:
        return None, None
    from distlaunch.planning.clusters.environment_reader import host_or_address

    host, number = text.strip(), ""
    if host.startswith("["):
        host, bracket, rest = host[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise _endpoint_error(text, who)
        number = rest[1:]
    elif host.count(":") == 1:
        host, _, number = host.partition(":")
        if not number:
            raise _endpoint_error(text, who)
    if number and not (number.isascii() and number.isdecimal()):
        raise _endpoint_error(text, who)
    if number and not (len(number) <= 5 and 0 < int(number) <= 65535):
        raise _endpoint_error(text, who, problem=f"port {printable(number)} is not in 1..65535")
    host_or_address(host, who, hint="HOST:PORT, HOST being the node of rank 0")
    return host, int(number) if number else None


def first_host_of_options(options: TrainOptions) -> tuple[str | None, str]:
    """Return the host of node 0 that an option names, perhaps None, and the field of that option.
    Raises ConfigError."""
    if options.rendezvous is not None:
        return rendezvous_endpoint(options)[0], "rendezvous"
    return options.master_addr, "master_addr"


def _endpoint_error(text: str, who: str, *, problem: str = "expected HOST:PORT") -> ConfigError:
    kind = UsageError if who.startswith("-") else ConfigError
    return kind(
        f"{who} {quoted(text)}: {problem}",
        hint="an IPv6 address needs brackets: [fd00::1]:29400",
    )


# --- settled at the start


def no_addresses(host: str) -> Sequence[str]:
    """Return nothing: the scheduler knows no addresses of the host."""
    del host
    return ()


class AddressChooser:
    """Chooses MASTER_ADDR for each attempt from the reports of the nodes.

    ``rendezvous_host`` is the host at which the launchers connect, if each node has one.
    """

    def __init__(
        self, options: TrainOptions, backend: PlannedBackend, *, rendezvous_host: str | None = None
    ) -> None:
        self._options, self._backend = options, backend
        self._rendezvous_host = rendezvous_host

    def candidates(
        self, surveyed: Surveyed, host: str, *, of_scheduler: AddressesOf = no_addresses
    ) -> tuple[str, ...]:
        """Return the addresses at which other nodes try to reach rank 0's node, best first.

        ``surveyed`` is the survey of rank 0's node, ``host`` its name in the list of hosts. Raises
        ConfigError if there is none, or the backend can use none.
        """
        found = self._candidate_addresses(surveyed, host, of_scheduler)
        return usable_by(self._backend, found, host)

    def _candidate_addresses(
        self, surveyed: Surveyed, host: str, of_scheduler: AddressesOf
    ) -> tuple[str, ...]:
        from distlaunch.planning import interfaces
        from distlaunch.planning.hosts.this_host import is_loopback

        options, rendezvous_host = self._options, self._rendezvous_host
        if options.master_addr is not None:
            return (options.master_addr,)
        if options.interface is not None or rendezvous_host is None:
            return interfaces.addresses(
                surveyed, host, interface=options.interface, of_scheduler=of_scheduler(host)
            )
        try:
            found = interfaces.addresses(surveyed, host, of_scheduler=of_scheduler(host))
        except ConfigError:
            found = ()
        numeric = rendezvous_host.replace(".", "").isdecimal() or ":" in rendezvous_host
        direct = numeric or is_loopback(rendezvous_host)
        first = (rendezvous_host,) if direct and rendezvous_host not in _UNSPECIFIED else ()
        return tuple(dict.fromkeys((*first, *found, rendezvous_host)))

    def choose(
        self,
        surveys: Sequence[Surveyed],
        reached: Mapping[int, Reached],
        hosts: Sequence[str],
        *,
        of_scheduler: AddressesOf = no_addresses,
        set_by_user: Mapping[str, str] | None = None,
        nccl: bool = True,
    ) -> MasterChoice:
        """Return the first candidate that all other nodes have reached.

        All arguments are by node rank. Raises the errors of ``choose_reached``, and ConfigError if
        the backend rejects the nodes.
        """
        found = choose_reached(
            surveys,
            reached,
            tried=self.candidates(surveys[0], hosts[0], of_scheduler=of_scheduler),
            hosts=hosts,
            interface=self._options.interface,
            set_by_user=set_by_user,
            nccl=nccl,
        )
        self._backend.check_nodes(surveys, hosts)
        return found


def usable_by(backend: PlannedBackend, found: tuple[str, ...], host: str) -> tuple[str, ...]:
    """Return those of the addresses that the backend's workers can use: some backends need IPv4.

    Raises ConfigError if none remains.
    """
    if not backend.ipv4_only:
        return found
    left = tuple(address for address in found if ":" not in address)
    if found and not left:
        raise ConfigError(
            f"{backend.ipv4_only}, but {printable(host)} has only {', '.join(found)}",
            hint=f"{Opt.INTERFACE('NAME|CIDR')} chooses a network that has IPv4, "
            f"{Opt.MASTER_ADDR} HOST an "
            "address",
        )
    return left


def choose_reached(
    surveys: Sequence[Surveyed],
    reached: Mapping[int, Reached],
    *,
    tried: Sequence[str],
    hosts: Sequence[str],
    interface: str | None = None,
    set_by_user: Mapping[str, str] | None = None,
    nccl: bool = True,
) -> MasterChoice:
    """Return the first of the addresses ``tried`` that every node but the first has reached.

    All arguments are by node rank. ``hosts`` has names for messages. ``set_by_user`` are the user's
    variables for workers. ``nccl``: workers may use NCCL. Raises NodesError, which lists the nodes
    that cannot reach rank 0's, and ConfigError if a node lacks ``interface``.
    """
    from distlaunch.planning.interfaces import interface_variables, own_address

    ranks = range(1, len(surveys))
    ways = {
        rank: {route.address: route for route in _routes_of(reached, rank, tried)} for rank in ranks
    }
    address = next(
        (each for each in tried if all(each in routes for routes in ways.values())), None
    )
    if address is None:
        raise _no_common_address_error(surveys, reached, tried, hosts)
    taken = set_by_user or {}
    env: dict[int, Mapping[str, str]] = {}
    shared: dict[tuple[tuple[str, str], ...], Mapping[str, str]] = {}
    others = [routes[address].local for routes in ways.values()]
    for rank, surveyed in enumerate(surveys):
        near = ways[rank][address].local if rank else own_address(surveyed, address, others)
        name = ways[rank][address].interface if rank else ""
        wanted = interface_variables(surveyed, hosts[rank], near, name, interface, nccl=nccl)
        left = {
            key: value
            for key, value in wanted.items()
            if key not in taken and not surveyed.environ.get(key)
        }
        if left:
            env[rank] = shared.setdefault(tuple(left.items()), left)
    return MasterChoice(address=address, env=env, addresses=(address, *others))


def _routes_of(reached: Mapping[int, Reached], rank: int, tried: Sequence[str]) -> Sequence[Route]:
    """Return a node's routes to the addresses that it was asked to try."""
    return (
        [route for route in reached[rank].routes if route.address in tried]
        if rank in reached
        else ()
    )


def _no_common_address_error(
    surveys: Sequence[Surveyed],
    reached: Mapping[int, Reached],
    tried: Sequence[str],
    hosts: Sequence[str],
) -> NodesError:
    from distlaunch.core.model.host_list import name_hosts
    from distlaunch.planning.interfaces import describe_addresses

    master, at = printable(hosts[0]), ", ".join(tried[:_SHOWN])
    lost = [rank for rank in range(1, len(hosts)) if not _routes_of(reached, rank, tried)]
    if lost:
        names = name_hosts(hosts[rank] for rank in lost)
        why = next(
            (problem for rank in lost if rank in reached and (problem := reached[rank].problem)),
            None,
        )
        message = (
            f"{names} cannot connect to {master}, the node of rank 0, at "
            f"{at}{f': {printable(why)}' if why else ''}"
        )
        hint = (
            f"a firewall may be in between: {Opt.MASTER_PORT} N names the port to open; "
            f"{Opt.MASTER_ADDR} "
            "ADDRESS and"
            f" {Opt.INTERFACE('NAME|CIDR')} choose the network; of {master}: "
            f"{describe_addresses(surveys[0])}"
        )
        return NodesError(message, hint=hint)
    by = [
        f"{name_hosts(names)} by {address} only"
        for address, names in _group_by_addresses(reached, tried, hosts)
    ]
    more = f", and {counted(len(by) - _SHOWN, 'other')}" if len(by) > _SHOWN else ""
    return NodesError(
        f"no address of {master}, the node of rank 0, is reached by all nodes: "
        f"{', '.join(by[:_SHOWN])}{more}",
        hint=f"{Opt.INTERFACE('NAME|CIDR')} chooses the network that all have, {Opt.EXCLUDE} "
        "leaves nodes out",
    )


def _group_by_addresses(
    reached: Mapping[int, Reached], tried: Sequence[str], hosts: Sequence[str]
) -> Iterator[tuple[str, list[str]]]:
    groups: dict[str, list[str]] = {}
    for rank in range(1, len(hosts)):
        found = {route.address for route in _routes_of(reached, rank, tried)}
        groups.setdefault(" and ".join(each for each in tried if each in found), []).append(
            hosts[rank]
        )
    yield from groups.items()
