"""Select the addresses of a node for other nodes, and the interface for its workers. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import printable, quoted
from distlaunch.core.model.variables import SET_FOR_NODES
from distlaunch.planning.hosts.this_host import is_loopback

if TYPE_CHECKING:
    from distlaunch.core.protocol.agent_messages import Interface, Surveyed

_GLOO, _TENSORPIPE, _NCCL = SET_FOR_NODES
_BRIDGES = (
    "docker", "br-", "virbr", "lxcbr", "lxdbr", "podman", "cni", "flannel", "cali", "cilium", "veth", "vnet", "kube",
    "nerdctl", "vmnet", "vboxnet", "weave", "dummy",
)  # fmt: skip
"""Prefixes of interfaces to networks inside one machine, where many machines have the same
addresses."""
_NOT_FOR_NCCL = ("lo", "docker")
_TUNNELS = ("tun", "tap", "wg", "tailscale", "zt", "ppp", "utun")
_LONGEST_NAME = 15
"""Longest name of an interface in bytes: the kernel's IFNAMSIZ, less the zero at its end."""
_SHOWN = 8


def check_interface(text: str, who: str | None = None) -> None:
    """Raise ConfigError, with the option ``who``, if ``text`` can be neither the name of an
    interface nor a network.

    Whether a node has it is checked later.
    """
    who = who or str(Opt.INTERFACE)
    hint = "the name that ip addr shows (eth0, ib0), or a network (10.1.0.0/16)"
    if "/" in text or ":" in text:
        if _parse_network(text) is None:
            raise ConfigError(f"{who} {quoted(text)}: not a network", hint=hint)
    elif text.replace(".", "").isdecimal() and text.count(".") > 1:
        raise ConfigError(
            f"{who} {quoted(text)}: an address is not a network", hint=f"{text}/32, or {hint}"
        )
    elif len(text.encode(errors="surrogateescape")) > _LONGEST_NAME or any(
        c.isspace() for c in text
    ):
        raise ConfigError(f"{who} {quoted(text)}: not the name of an interface", hint=hint)


def addresses(
    surveyed: Surveyed,
    host: str,
    *,
    interface: str | None = None,
    of_scheduler: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the addresses at which other nodes may reach a node, best first.

    ``host`` is the node's name in the list of hosts. ``of_scheduler`` are the addresses by which
    the scheduler reaches it; they follow those of the node's own name. Raises ConfigError if the
    node has no such ``interface``, or no address at all.
    """
    candidates = _chosen_interfaces(surveyed, host, interface)
    if interface is not None:
        of_scheduler = ()
    if not candidates and not of_scheduler:
        raise ConfigError(
            f"{printable(host)} has no address by which other nodes could reach it",
            hint=describe_addresses(surveyed),
        )
    order: dict[str, int] = {}
    for address in (*surveyed.named, *of_scheduler):
        order.setdefault(address, len(order))

    def rank(each: Interface) -> tuple[object, ...]:
        return (
            each.address != host,
            _rank_of_kind(each.name),
            order.get(each.address, len(order)),
            ":" in each.address,
        )

    return tuple(
        dict.fromkeys((*(each.address for each in sorted(candidates, key=rank)), *of_scheduler))
    )


def own_address(surveyed: Surveyed, address: str, others: Sequence[str]) -> str:
    """Return the address of rank 0's own interface that the other nodes reach with ``address``.

    It is ``address`` if the node has it, or it is loopback. Otherwise (for example behind NAT) it
    is one in the network of the first of ``others``, the local ends of the other nodes'
    connections; without one there, the node's first.
    """
    usable = list(_usable_interfaces(surveyed))
    if is_loopback(address) or any(each.address == address for each in usable):
        return address
    for each in usable:
        network = _parse_network(f"{each.address}/{each.prefix}")
        if network is not None and any(_is_within(other, network) for other in others[:1]):
            return each.address
    return usable[0].address if usable else address


def interface_variables(
    surveyed: Surveyed, host: str, near: str, name: str, interface: str | None, *, nccl: bool
) -> Mapping[str, str]:
    """Return the variables that make a node's workers use the interface with the address ``near``.

    ``name`` is the interface's name if the node has reported it. ``interface`` is the user's
    choice. Without the variables, Gloo and TensorPipe use the first address to which the machine's
    own name resolves, and NCCL all interfaces except loopback and docker's. A variable is only set
    if the library would choose another interface.
    """
    usable = list(_usable_interfaces(surveyed))
    if interface is not None:
        wanted = _chosen_interfaces(surveyed, host, interface)
        if all(each.address != near for each in wanted):
            near, name = wanted[0].address, wanted[0].name
    name = name or next((each.name for each in usable if each.address == near), "")
    if not name:
        return {}
    variables = {}
    if _address_of_own_name(surveyed) != near:
        variables = {_GLOO: name, _TENSORPIPE: name}
    names = {each.name for each in surveyed.interfaces if not each.name.startswith(_NOT_FOR_NCCL)}
    if nccl and len(names) > 1:
        variables[_NCCL] = f"={name}"
    return variables


def names_of_loopback(surveys: Sequence[Surveyed], hosts: Sequence[str]) -> dict[str, str]:
    """Return the nodes whose own name resolves to a loopback address, each with this address; none
    if all are one machine."""
    named = {
        host: _address_of_own_name(surveyed) for surveyed, host in zip(surveys, hosts, strict=True)
    }
    machines = {frozenset(each.address for each in surveyed.interfaces) for surveyed in surveys}
    if len(machines) == 1:
        return {}
    return {
        host: address
        for host, address in named.items()
        if address is not None and is_loopback(address)
    }


def describe_addresses(surveyed: Surveyed) -> str:
    """Return the node's interfaces and addresses as a hint."""
    usable = list(_usable_interfaces(surveyed))
    listed = ", ".join(
        f"{printable(each.name)} {each.address}/{each.prefix}" for each in usable[:_SHOWN]
    )
    return (
        f"it has {listed}{', ...' * (len(usable) > _SHOWN)}"
        if listed
        else "it has only loopback addresses"
    )


def _chosen_interfaces(surveyed: Surveyed, host: str, interface: str | None) -> list[Interface]:
    """Return the node's addresses on an interface or network, by default all usable ones. Raise
    ConfigError if it has none."""
    usable = list(_usable_interfaces(surveyed))
    if interface is None:
        return usable
    network = _parse_network(interface) if "/" in interface or ":" in interface else None
    if network is None:
        wanted = [each for each in usable if each.name == interface]
        said = f"interface {quoted(interface)} with an address that others may reach"
    else:
        wanted = [each for each in usable if _is_within(each.address, network)]
        said = f"address in {interface}"
    if not wanted:
        raise ConfigError(
            f"{Opt.INTERFACE}: {printable(host)} has no {said}", hint=describe_addresses(surveyed)
        )
    return wanted


def _usable_interfaces(surveyed: Surveyed) -> Iterator[Interface]:
    """Yield the node's addresses that are neither loopback nor link-local."""
    for each in surveyed.interfaces:
        address = each.address.lower()
        link_local = address.startswith("169.254.") or address[:3] in {"fe8", "fe9", "fea", "feb"}
        if not (address.startswith("127.") or address == "::1" or link_local):
            yield each


def _address_of_own_name(surveyed: Surveyed) -> str | None:
    """Return the first address to which the machine's own name resolves and that it has, or a
    loopback one; None if there is neither."""
    own = {each.address for each in surveyed.interfaces}
    return next((each for each in surveyed.named if each in own or is_loopback(each)), None)


def _rank_of_kind(name: str) -> int:
    return 2 if name.startswith(_BRIDGES) else 1 if name.startswith(_TUNNELS) else 0


def _parse_network(text: str) -> tuple[int, int, int] | None:
    """Return a network's IP version, its address as a number, and its number of host bits; None if
    the text is no network."""
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
