"""Parse hosts in the forms that users write: on the command line, in host files, in the output of a
script. No I/O.

The grammar is ``[USER@]HOST[:SLOTS][:port=N]``. HOST is a name, a list such as ``n[01-04]``, an
IPv4 address, or an IPv6 address in brackets. A line of a host file may also have an IPv6 address
without brackets. A number after a colon is always the number of slots, as in Horovod and Hydra, so
an SSH port is written with its key: ``a:4:port=2222``, in a file also ``a slots=4 port=2222`` as in
Open MPI.

A line of a host file may continue with ``key=value`` words. Keys that tell Open MPI or Hydra how to
place and bind workers are ignored. Unknown keys are an error.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.host_list import MOST_HOSTS, expand_item, without_blanks_in_brackets
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import printable, quoted
from distlaunch.planning.allocation import Host

MOST_SLOTS = 65_536
"""Largest number of slots of one host. A larger one counts as a typing error."""
_MOST_MENTIONS = 1 << 22
"""How often one file may name hosts in total. It may have a line for each slot."""
_MOST_PORT = 65_535

_SLOTS = frozenset({"slots", "slot", "cpus", "cpu", "count"})
_USER = frozenset({"user", "username", "user_name"})
_MAX_SLOTS = frozenset(
    {
        "max_slots",
        "slots_max",
        "max_cpus",
        "cpus_max",
        "max_cpu",
        "cpu_max",
        "max_count",
        "count_max",
    },
)  # Open MPI's upper limits
_MACHINE_KEYS = frozenset({"boards", "sockets", "sockets_per_board", "cores", "cores_per_socket"})
_HYDRA_KEYS = frozenset({"ifname", "binding"})  # Hydra

_PIECE = re.compile(r"(?:[^,\[\]]+|\[[^\[\]]*\]|[\[\]])*")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = re.compile(rf"{_BYTE}(?:\.{_BYTE}){{3}}")
_USER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+\\-]*")  # DOMAIN\user, user@domain
_ZONE = re.compile(r"[A-Za-z0-9_.-]+")

_FLAG_HINT = (
    "hosts look like a:4,b:2, with user@, [::1]:2, n[01-04]:8 or :port=2222 where needed; no blanks"
)
_LINE_HINT = (
    "a line looks like 'host slots=4', 'host:4' or 'host'; port=2222 and user@host are "
    "understood as well"
)
_BAD_PREFIXES = {
    "+": "hosts by number are Open MPI's own; write their names",
    "-": "a host name begins with a letter or digit",
}


class _HostFields(NamedTuple):
    """What follows the name of a host."""

    user: str | None
    slots: int | None
    port: int | None


class _Entry(NamedTuple):
    """One entry of a list or line of a file. ``names`` has several names for a range."""

    names: list[str]
    user: str | None
    fields: _HostFields


class _Style(NamedTuple):
    """What differs between the command line and a line of a file."""

    hint: str
    raw_ipv6: bool
    """Accept an IPv6 address without brackets, as Open MPI does. All of ``::1:4`` is then the
    address."""


class _Source(NamedTuple):
    """The file and line, or the option, of an entry, for errors."""

    where: str
    shown: str
    style: _Style

    def error(self, what: str, hint: str | None = None) -> ConfigError:
        """Return the error ``what`` about this entry, with ``hint`` or the general hint."""
        return _host_error(
            self.where, f"{quoted(self.shown.strip())}: {what}", hint or self.style.hint
        )


_FLAG = _Style(hint=_FLAG_HINT, raw_ipv6=False)
_LINE = _Style(hint=_LINE_HINT, raw_ipv6=True)


def parse_hosts(text: str, where: str | None = None) -> tuple[Host, ...]:
    """Return the hosts of a list such as ``a:4,user@b:2,[::1]:2,n[01-04]``.

    ``where`` is its source, for errors (by default --hosts). Slots of a host that is named again
    are added. Raises ConfigError for an entry that cannot be parsed, and for two entries of one
    host that contradict each other.
    """
    where = where or str(Opt.HOSTS)
    found = _HostCollector(_FLAG)
    cache: dict[tuple[str | None, ...], _HostFields] = {}
    for entry in _split_at_commas(text):
        word = entry.strip()
        if not word:
            raise _host_error(where, f"{quoted(text)}: an entry is empty", _FLAG_HINT)
        found.add(_parse_entry([word], _Source(where, word, _FLAG), cache), where)
    return found.hosts()


def read_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Return the hosts of a host file of any dialect, in the order of the file.

    Raises ConfigError, with ``path`` and line, for an invalid line, and if the file names no host.

    A line may have a count, the number of slots; counts of one host are added. Lines without a
    count have one of two meanings:

    * If they name any host more than once, each of these lines is one slot, as in PBS.
    * If they name each host only once, the number of slots of these hosts is not known.
    """
    hosts = read_lines(text, f"{path}:")
    if not hosts:
        raise _host_error(path, "the file names no host", _LINE_HINT)
    return hosts


def read_lines(text: str, before: str) -> tuple[Host, ...]:
    """Return the hosts in the lines of ``text``, possibly none.

    Errors name a line by ``before`` and its number. Slots count as in ``read_hostfile``. Raises
    ConfigError.
    """
    found = _HostCollector(_LINE)
    cache: dict[tuple[str | None, ...], _HostFields] = {}
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    for number, line in enumerate(text.split("\n"), 1):
        entry = without_blanks_in_brackets(line.partition("#")[0].partition("//")[0])
        words = entry.split()
        if len(words) > 2 and "=" in entry:  # Open MPI allows blanks around "="
            words = " ".join(words).replace(" =", "=").replace("= ", "=").split()
        if words:
            where = f"{before}{number}"
            found.add(_parse_entry(words, _Source(where, entry, _LINE), cache), where)
    return found.hosts()


class _FoundHost:
    """A host found so far. Further entries may add slots."""

    __slots__ = ("lines", "name", "port", "slots", "user", "where")

    def __init__(self, name: str, entry: _Entry, where: str) -> None:
        self.name = name
        self.user = entry.user
        self.slots = entry.fields.slots
        self.port = entry.fields.port
        self.where = where
        self.lines = 1

    def merge(self, entry: _Entry, where: str) -> None:
        """Add the slots of another entry for this host. ``where`` is the file and line, for errors.

        Raises ConfigError if the user or port differs, if only one entry has slots, or if the sum
        is over MOST_SLOTS.
        """
        slots, port = entry.fields.slots, entry.fields.port
        if (self.user, self.port, self.slots is None) != (entry.user, port, slots is None):
            raise _contradiction_error(self, entry, where)
        self.lines += 1
        if self.slots is not None and slots is not None:
            self.slots += slots
            if self.slots > MOST_SLOTS:
                raise _host_error(
                    where,
                    f"{quoted(self.name)} gets more than {MOST_SLOTS:,} slots",
                    "name each host once",
                )


class _HostCollector:
    """Collects hosts in the order of their first mention."""

    def __init__(self, style: _Style) -> None:
        self._seen: dict[str, _FoundHost] = {}
        self._mentions = 0
        self._hint = style.hint

    def add(self, entry: _Entry, where: str) -> None:
        """Add the hosts of one entry. Raises ConfigError, with ``where``, if it contradicts an
        earlier one."""
        seen = self._seen
        self._mentions += len(entry.names)
        if self._mentions > _MOST_MENTIONS:
            raise _host_error(
                where, f"hosts are named more than {_MOST_MENTIONS:,} times", self._hint
            )
        for name in entry.names:
            key = name.lower() if ":" not in name else _canonical_ipv6(name)
            before = seen.get(key)
            if before is None:
                seen[key] = _FoundHost(name, entry, where)
            else:
                before.merge(entry, where)
        if len(seen) > MOST_HOSTS:
            raise _host_error(where, f"there are more than {MOST_HOSTS:,} hosts", self._hint)

    def hosts(self) -> tuple[Host, ...]:
        """Return the hosts. If one without a count was named twice, every line without a count is a
        slot."""
        seen = self._seen.values()
        counts_lines = any(host.lines > 1 and host.slots is None for host in seen)
        return tuple(
            Host(
                name=host.name,
                slots=host.lines if counts_lines and host.slots is None else host.slots,
                user=host.user,
                port=host.port,
                devices=None,
            )
            for host in seen
        )


def _contradiction_error(first: _FoundHost, second: _Entry, where: str) -> ConfigError:
    name = quoted(first.name)
    earlier = f" (the first is {printable(first.where)})" if first.where != where else ""
    if first.port != second.fields.port:
        both = " and ".join(
            "none" if port is None else str(port) for port in (first.port, second.fields.port)
        )
        what = f"twice with a different port of SSH, {both}"
    elif first.user != second.user:
        both = " and ".join(
            "none" if user is None else quoted(user) for user in (first.user, second.user)
        )
        what = f"twice with a different user, {both}"
    else:
        what = "with a number of slots and without"
    return _host_error(
        where,
        f"{name} is named {what}{earlier}",
        "the lines of one host must agree; it is best to name it once",
    )


def _split_at_commas(text: str) -> list[str]:
    if "[" not in text:
        return text.split(",")
    entries: list[str] = []
    start = 0
    while match := _PIECE.match(text, start):  # it always matches, at the end nothing
        entries.append(match[0])
        start = match.end() + 1
        if start > len(text):
            break
    return entries


def _parse_entry(
    words: list[str], source: _Source, cache: dict[tuple[str | None, ...], _HostFields]
) -> _Entry:
    """Parse ``[user@]host[:slots][:key=value]...`` and the ``key=value`` words after it.

    ``cache`` has parsed fields by their text: most lines of a long file have the same. Raises
    ConfigError.
    """
    word = words[0]
    user: str | None = None
    if "@" in word:
        user, _, word = word.rpartition("@")
        _check_user(user, source)
    if word[:1] in _BAD_PREFIXES:
        raise source.error("this is not a host", _BAD_PREFIXES[word[0]])
    if word[:1] == "^":
        raise source.error("this is not a host", f"leave hosts out with {Opt.EXCLUDE}")
    names, rest = _parse_host(word, source)
    key = (rest, *words[1:])
    fields = cache.get(key)
    if fields is None:
        cache[key] = fields = _parse_fields(rest, words[1:], source)
    if fields.user is not None:
        if user not in {None, fields.user}:
            raise source.error("it names two users")
        user = fields.user
    return _Entry(names, user, fields)


def _parse_fields(rest: str | None, words: list[str], source: _Source) -> _HostFields:
    fields: dict[str, str] = {}
    for part in rest.split(":") if rest is not None else ():
        key, equal, value = part.partition("=")
        _set_field(fields, key if equal else "slots", value if equal else part, source)
    for word in words:
        key, equal, value = word.partition("=")
        if not equal:
            raise source.error(f"expected key=value, found {quoted(word)}")
        _set_field(fields, key, value, source)
    slots = port = most = user = None
    for key, value in fields.items():
        if key == "slots":
            slots = _parse_number(value, "the number of slots", MOST_SLOTS, source)
        elif key == "port":
            port = _parse_number(value, "the port of SSH", _MOST_PORT, source)
        elif key == "max_slots":
            most = _parse_number(value, "the largest number of slots", MOST_SLOTS, source)
        elif key == "user":
            _check_user(value, source)
            user = value
        elif key in _MACHINE_KEYS:
            _parse_number(value, key, MOST_SLOTS, source)
        elif not value:
            raise source.error(f"{key}= has no value")
    if slots is not None and most is not None and most < slots:
        raise source.error(
            f"there are more slots ({slots}) than the largest number allows ({most})"
        )
    return _HostFields(user, slots, port)


def _set_field(fields: dict[str, str], key: str, value: str, source: _Source) -> None:
    key = key.lower().replace("-", "_")
    if key in _SLOTS:
        key = "slots"
    elif key in _MAX_SLOTS:
        key = "max_slots"
    elif key in _USER:
        key = "user"
    elif key != "port" and key not in _MACHINE_KEYS and key not in _HYDRA_KEYS:
        raise source.error(f"the key {quoted(key)} is not known")
    if key in fields:
        raise source.error(f"{key} is given twice")
    fields[key] = value


def _parse_host(word: str, source: _Source) -> tuple[list[str], str | None]:
    """Split ``host:rest`` into host names (several for a range) and the rest, which is None without
    a colon. Raises ConfigError."""
    name, colon, rest = word.partition(":")
    if _PLAIN.fullmatch(name) and ":" not in rest:  # true for nearly all entries of a long file
        _check_ipv4(name, source)
        return [name], rest if colon else None
    if word.startswith("[") and ":" in (inner := word[1:].partition("]"))[0]:
        address, closed, rest = inner
        if not closed or rest[:1] not in {"", ":"}:
            raise source.error("expected ] and optionally :SLOTS after the IPv6 address")
        return [_parse_ipv6(address, source)], rest[1:] if rest else None
    if "[" in word:
        end = word.rfind("]") + 1
        fields, colon, rest = word[end:].partition(":")
        name = word[:end] + fields
    elif ":" in rest and _is_ipv6(word):
        if source.style.raw_ipv6:
            return [_parse_ipv6(word, source)], None
        raise source.error(
            "an IPv6 address needs brackets", f"write [{printable(word)}] or [{printable(word)}]:4"
        )
    if not name:
        raise source.error("the host is missing")
    names = expand_item(name, where=source.where)
    for each in names if "." in name else ():
        _check_ipv4(each, source)
    return names, rest if colon else None


def _parse_number(text: str, what: str, most: int, source: _Source) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= most:
        return int(text)
    raise source.error(f"{what} has to be a whole number from 1 to {most}, not {quoted(text)}")


def _check_user(user: str, source: _Source) -> None:
    if not _USER_NAME.fullmatch(user):
        raise source.error(f"{quoted(user)} is not a user name")


def _check_ipv4(name: str, source: _Source) -> None:
    """Raise ConfigError for a name of digits and dots that is not an IPv4 address.

    Numbers with a leading zero are invalid too, because some programs read them as octal.
    """
    if "." in name and not name.strip("0123456789.") and not _IPV4.fullmatch(name):
        raise source.error(f"{quoted(name)} is not an IPv4 address")


def _is_ipv6(text: str) -> bool:
    import ipaddress

    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _parse_ipv6(text: str, source: _Source) -> str:
    zone = text.partition("%")[2]
    if not _is_ipv6(text) or (zone and not _ZONE.fullmatch(zone)):
        raise source.error(f"{quoted(text)} is not an IPv6 address")
    return text


def _canonical_ipv6(name: str) -> str:
    import ipaddress

    return str(ipaddress.IPv6Address(name))


def _host_error(where: str, what: str, hint: str) -> ConfigError:
    return ConfigError(f"{printable(where)}: {what}", hint=hint)
