"""Decide whether the name of a host means this machine. No I/O.

On this machine the launcher starts the agent itself. On any other host it uses a transport, even if
that host is the only one: ``--hosts b:8`` on machine ``a`` starts a job on ``b``.
"""

from __future__ import annotations

from functools import lru_cache

from distlaunch.core.model.record import Record

_LOCALHOST = frozenset(
    {"localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"}
    | {"localhost.localdomain", "localhost4.localdomain4", "localhost6.localdomain6"}
)
"""Names for loopback that distributions write into /etc/hosts."""


class Identity(Record):
    """The names and addresses of this machine."""

    hostname: str
    """The kernel's hostname, with or without domain."""
    fqdn: str | None = None
    """The name with domain from /etc/hosts."""
    addresses: tuple[str, ...] = ()
    """IPv4 and IPv6 addresses of the machine's interfaces, perhaps without loopback."""
    aliases: tuple[str, ...] = ()
    """Other names of this machine, found in /etc/hosts by ``names_in``."""


def is_this_machine(name: str, identity: Identity) -> bool:
    """Return whether a host name or address (no user, port or brackets) means this machine.

    A name without a domain matches any domain. Two names with different domains are different
    machines, unless one domain is the beginning of the other (``n1.cluster`` and
    ``n1.cluster.example.org``).
    """
    name = _normalize_name(name)
    address = _canonical_address(name)
    if address is not None:
        return _is_loopback(address) or address in _own_addresses(identity.addresses)
    if _is_localhost(name):
        return True
    names, domain = _own_names(identity)
    return bool(name) and (name in names or any(_is_same_name(name, own, domain) for own in names))


def is_loopback(name: str) -> bool:
    """Return whether a host name or address means, on every machine, that machine itself."""
    name = _normalize_name(name)
    address = _canonical_address(name)
    return _is_localhost(name) if address is None else _is_loopback(address)


def names_in(hosts_file: str, addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that a text of /etc/hosts has for loopback and for these addresses.

    A name with several addresses belongs to the first, as for the resolver.
    """
    own = _own_addresses(addresses)
    ours: dict[str, bool] = {}
    for line in hosts_file.splitlines():
        words = line.partition("#")[0].split()
        address = _canonical_address(words[0]) if words else None
        if address is not None:
            for word in words[1:]:
                ours.setdefault(_normalize_name(word), _is_loopback(address) or address in own)
    return tuple(name for name, is_ours in ours.items() if is_ours and not _is_localhost(name))


def _normalize_name(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_localhost(name: str) -> bool:
    """Return whether a name means loopback. RFC 6761 reserves all names below ``localhost``."""
    return name in _LOCALHOST or name.endswith(".localhost")


def _is_loopback(address: str) -> bool:
    """Return whether an address leads to this machine, also the unspecified one (0.0.0.0)."""
    return address.startswith("127.") or address in {"::1", "::", "0.0.0.0"}  # noqa: S104 - compared, not bound


def _canonical_address(text: str) -> str | None:
    """Return an address in canonical spelling without zone; None for a name."""
    if ":" not in text and text.strip("0123456789."):
        return None
    import ipaddress

    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


@lru_cache(maxsize=4)
def _own_addresses(addresses: tuple[str, ...]) -> frozenset[str]:
    return frozenset(
        address for address in map(_canonical_address, addresses) if address is not None
    )


@lru_cache(maxsize=4)
def _own_names(identity: Identity) -> tuple[frozenset[str], str]:
    """Return the names of this machine, and the domain for names without one ("" if unknown).

    The domain is only taken from a name that begins with the hostname: a resolver may return the
    name of loopback, an address, or a name from a reverse zone.
    """
    hostname, fqdn = _normalize_name(identity.hostname), _normalize_name(identity.fqdn or "")
    names = [hostname, fqdn, *map(_normalize_name, identity.aliases)]
    kept = frozenset(
        name
        for name in names
        if name and not _is_localhost(name) and _canonical_address(name) is None
    )
    domain = hostname.partition(".")[2]
    if not domain and fqdn.startswith(f"{hostname}."):
        domain = fqdn.partition(".")[2]
    return kept, domain


def _is_same_name(name: str, own: str, own_domain: str) -> bool:
    short, _, domain = name.partition(".")
    own_short, _, known = own.partition(".")
    known = known or own_domain
    if short != own_short:
        return False
    return (
        not domain
        or not known
        or f"{known}.".startswith(f"{domain}.")
        or f"{domain}.".startswith(f"{known}.")
    )
