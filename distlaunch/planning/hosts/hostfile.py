"""Parses hosts as people write them: on the command line, in host files, in the output of a script.
No I/O.

The grammar is ``[USER@]HOST[:SLOTS][:port=N]``. HOST is a name, a list such as ``n[01-04]``, an
IPv4 address, or an IPv6 address in brackets. A line of a host file may also have an IPv6 address
without brackets. A number after a colon is always the number of slots, as in Horovod and Hydra. An
SSH port therefore needs its name: ``a:4:port=2222``, in a file also ``a slots=4 port=2222`` as in
Open MPI.

A line of a host file may continue with ``key=value`` words. Keys that tell Open MPI or Hydra how to
place and bind workers are ignored, because distlaunch does that in its own way. Unknown keys are an
error.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.host_list import MOST_HOSTS, expand_item, without_blanks_in_brackets
from distlaunch.core.model.text import printable, quoted
from distlaunch.planning.allocation import Host

MOST_SLOTS = 65_536
"""Largest number of slots of one host. A larger one is taken for a typing error."""
_MOST_MENTIONS = 1 << 22
"""How often one file may name hosts in all. A file may have a line for each slot."""
_MOST_PORT = 65_535

_SLOTS = frozenset({"slots", "slot", "cpus", "cpu", "count"})
_USER = frozenset({"user", "username", "user_name"})
_MOST = frozenset(
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
_NUMBERS = frozenset({"boards", "sockets", "sockets_per_board", "cores", "cores_per_socket"})
_WORDS = frozenset({"ifname", "binding"})  # Hydra

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
_BEGINNINGS = {
    "^": "leave hosts out with --exclude",
    "+": "hosts by number are Open MPI's own; write their names",
    "-": "a host name begins with a letter or digit",
}


class _Tail(NamedTuple):
    """What follows the name of a host."""

    user: str | None
    slots: int | None
    port: int | None


class _Entry(NamedTuple):
    """One entry or line. ``names`` has several names if a range was written."""

    names: list[str]
    user: str | None
    tail: _Tail


class _Style(NamedTuple):
    """What differs between the command line and a line of a file."""

    hint: str
    raw_ipv6: bool
    """Accept an IPv6 address without brackets, as Open MPI does. All of ``::1:4`` is then the
    address."""


class _Place(NamedTuple):
    """Where an entry stands, for errors."""

    where: str
    shown: str
    style: _Style

    def error(self, what: str, hint: str | None = None) -> ConfigError:
        """Return the error to raise about this entry."""
        return _error(self.where, f"{quoted(self.shown.strip())}: {what}", hint or self.style.hint)


_FLAG = _Style(hint=_FLAG_HINT, raw_ipv6=False)
_LINE = _Style(hint=_LINE_HINT, raw_ipv6=True)


def parse_hosts(text: str, where: str = "--hosts") -> tuple[Host, ...]:
    """Return the hosts of a list such as ``a:4,user@b:2,[::1]:2,n[01-04]``.

    A host that is named again adds its slots to the first mention. Raises ConfigError for an entry
    that cannot be parsed, and for two entries of one host that contradict each other.
    """
    found = _Found(_FLAG)
    tails: dict[tuple[str | None, ...], _Tail] = {}
    for entry in _entries(text):
        word = entry.strip()
        if not word:
            raise _error(where, f"{quoted(text)}: an entry is empty", _FLAG_HINT)
        found.add(_read([word], _Place(where, word, _FLAG), tails), where)
    return found.hosts()


def read_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Return the hosts of a host file of any dialect, in the order of the file.

    A host that is listed again adds its slots. If lines without a count repeat a host, each such
    line is a slot, as in PBS; otherwise the number of slots of these hosts is not known. ``path``
    is for error messages, which name the line. Raises ConfigError, also if the file names no host.
    """
    hosts = read_lines(text, f"{path}:")
    if not hosts:
        raise _error(path, "the file names no host", _LINE_HINT)
    return hosts


def read_lines(text: str, before: str) -> tuple[Host, ...]:
    """Return the hosts of a text, possibly none.

    ``before`` and the number of the line name the line in errors.
    """
    found = _Found(_LINE)
    tails: dict[tuple[str | None, ...], _Tail] = {}
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    for number, line in enumerate(text.split("\n"), 1):
        said = without_blanks_in_brackets(line.partition("#")[0].partition("//")[0])
        words = said.split()
        if len(words) > 2 and "=" in said:  # Open MPI takes blanks around "="
            words = " ".join(words).replace(" =", "=").replace("= ", "=").split()
        if words:
            place = f"{before}{number}"
            found.add(_read(words, _Place(place, said, _LINE), tails), place)
    return found.hosts()


class _Seen:
    """A host that was found so far. Several entries may add to its slots."""

    __slots__ = ("lines", "name", "port", "slots", "user", "where")

    def __init__(self, name: str, entry: _Entry, where: str) -> None:
        self.name = name
        self.user = entry.user
        self.slots = entry.tail.slots
        self.port = entry.tail.port
        self.where = where
        self.lines = 1

    def merge(self, entry: _Entry, where: str) -> None:
        """Add the slots of another entry with this host. Raises ConfigError if they contradict."""
        slots, port = entry.tail.slots, entry.tail.port
        if (self.user, self.port, self.slots is None) != (entry.user, port, slots is None):
            raise _contradiction(self, entry, where)
        self.lines += 1
        if self.slots is not None and slots is not None:
            self.slots += slots
            if self.slots > MOST_SLOTS:
                raise _error(
                    where,
                    f"{quoted(self.name)} gets more than {MOST_SLOTS:,} slots",
                    "name each host once",
                )


class _Found:
    """Collects hosts in the order of their first mention."""

    def __init__(self, style: _Style) -> None:
        self._seen: dict[str, _Seen] = {}
        self._mentions = 0
        self._hint = style.hint

    def add(self, entry: _Entry, where: str) -> None:
        """Add the hosts of one entry. Raises ConfigError if it contradicts an earlier one."""
        seen = self._seen
        self._mentions += len(entry.names)
        if self._mentions > _MOST_MENTIONS:
            raise _error(where, f"hosts are named more than {_MOST_MENTIONS:,} times", self._hint)
        for name in entry.names:
            key = name.lower() if ":" not in name else _same_ipv6(name)
            before = seen.get(key)
            if before is None:
                seen[key] = _Seen(name, entry, where)
            else:
                before.merge(entry, where)
        if len(seen) > MOST_HOSTS:
            raise _error(where, f"there are more than {MOST_HOSTS:,} hosts", self._hint)

    def hosts(self) -> tuple[Host, ...]:
        """Return the hosts.

        If a host without a count was named twice, every line without a count is a slot.
        """
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


def _contradiction(first: _Seen, second: _Entry, where: str) -> ConfigError:
    name = quoted(first.name)
    earlier = f" (the first is {printable(first.where)})" if first.where != where else ""
    if first.port != second.tail.port:
        said = " and ".join(
            "none" if port is None else str(port) for port in (first.port, second.tail.port)
        )
        what = f"twice with a different port of SSH, {said}"
    elif first.user != second.user:
        said = " and ".join(
            "none" if user is None else quoted(user) for user in (first.user, second.user)
        )
        what = f"twice with a different user, {said}"
    else:
        what = "with a number of slots and without"
    return _error(
        where,
        f"{name} is named {what}{earlier}",
        "lines of one host have to agree; naming it once is best",
    )


def _entries(text: str) -> list[str]:
    if "[" not in text:
        return text.split(",")
    entries: list[str] = []
    place = 0
    while match := _PIECE.match(text, place):  # it always matches, at the end nothing
        entries.append(match[0])
        place = match.end() + 1
        if place > len(text):
            break
    return entries


def _read(words: list[str], place: _Place, tails: dict[tuple[str | None, ...], _Tail]) -> _Entry:
    """Parse ``[user@]host[:slots][:key=value]...`` and the ``key=value`` words after it.

    ``tails`` has the parsed fields by their text, since most lines of a long file end alike.
    """
    word = words[0]
    user: str | None = None
    if "@" in word:
        user, _, word = word.rpartition("@")
        _check_user(user, place)
    if word[:1] in _BEGINNINGS:
        raise place.error("that is no host", _BEGINNINGS[word[0]])
    names, rest = _target(word, place)
    key = (rest, *words[1:])
    tail = tails.get(key)
    if tail is None:
        tails[key] = tail = _tail(rest, words[1:], place)
    if tail.user is not None:
        if user not in {None, tail.user}:
            raise place.error("it names two users")
        user = tail.user
    return _Entry(names, user, tail)


def _tail(rest: str | None, words: list[str], place: _Place) -> _Tail:
    said: dict[str, str] = {}
    for part in rest.split(":") if rest is not None else ():
        key, equal, value = part.partition("=")
        _say(said, key if equal else "slots", value if equal else part, place)
    for word in words:
        key, equal, value = word.partition("=")
        if not equal:
            raise place.error(f"{quoted(word)} is not understood, key=value was expected")
        _say(said, key, value, place)
    slots = port = most = user = None
    for key, value in said.items():
        if key == "slots":
            slots = _number(value, "the number of slots", MOST_SLOTS, place)
        elif key == "port":
            port = _number(value, "the port of SSH", _MOST_PORT, place)
        elif key == "max_slots":
            most = _number(value, "the largest number of slots", MOST_SLOTS, place)
        elif key == "user":
            _check_user(value, place)
            user = value
        elif key in _NUMBERS:
            _number(value, key, MOST_SLOTS, place)
        elif not value:
            raise place.error(f"{key}= says nothing")
    if slots is not None and most is not None and most < slots:
        raise place.error(f"there are more slots ({slots}) than the largest number allows ({most})")
    return _Tail(user, slots, port)


def _say(said: dict[str, str], key: str, value: str, place: _Place) -> None:
    key = key.lower().replace("-", "_")
    if key in _SLOTS:
        key = "slots"
    elif key in _MOST:
        key = "max_slots"
    elif key in _USER:
        key = "user"
    elif key != "port" and key not in _NUMBERS and key not in _WORDS:
        raise place.error(f"{quoted(key)} is not known")
    if key in said:
        raise place.error(f"{key} is said twice")
    said[key] = value


def _target(word: str, place: _Place) -> tuple[list[str], str | None]:
    """Split ``host:rest`` into the names that the host stands for and the rest (None without a
    colon)."""
    name, colon, rest = word.partition(":")
    if _PLAIN.fullmatch(name) and ":" not in rest:  # nearly all of a long file
        _check_ipv4(name, place)
        return [name], rest if colon else None
    if word.startswith("[") and ":" in (inner := word[1:].partition("]"))[0]:
        address, closed, rest = inner
        if not closed or rest[:1] not in {"", ":"}:
            raise place.error("after an IPv6 address come ] and maybe :SLOTS")
        return [_ipv6(address, place)], rest[1:] if rest else None
    if "[" in word:
        end = word.rfind("]") + 1
        tail, colon, rest = word[end:].partition(":")
        name = word[:end] + tail
    elif ":" in rest and _is_ipv6(word):
        if place.style.raw_ipv6:
            return [_ipv6(word, place)], None
        raise place.error(
            "an IPv6 address needs brackets", f"write [{printable(word)}] or [{printable(word)}]:4"
        )
    if not name:
        raise place.error("the host is missing")
    names = expand_item(name, where=place.where)
    for each in names if "." in name else ():
        _check_ipv4(each, place)
    return names, rest if colon else None


def _number(text: str, what: str, most: int, place: _Place) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= most:
        return int(text)
    raise place.error(f"{what} has to be a whole number from 1 to {most}, not {quoted(text)}")


def _check_user(user: str, place: _Place) -> None:
    if not _USER_NAME.fullmatch(user):
        raise place.error(f"{quoted(user)} is no user name")


def _check_ipv4(name: str, place: _Place) -> None:
    """Reject a name of digits and dots that is not an IPv4 address.

    A leading zero is rejected too, because some programs read it as octal.
    """
    if "." in name and not name.strip("0123456789.") and not _IPV4.fullmatch(name):
        raise place.error(f"{quoted(name)} is no IPv4 address")


def _is_ipv6(text: str) -> bool:
    import ipaddress

    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _ipv6(text: str, place: _Place) -> str:
    zone = text.partition("%")[2]
    if not _is_ipv6(text) or (zone and not _ZONE.fullmatch(zone)):
        raise place.error(f"{quoted(text)} is no IPv6 address")
    return text


def _same_ipv6(name: str) -> str:
    import ipaddress

    return str(ipaddress.IPv6Address(name))


def _error(where: str, what: str, hint: str) -> ConfigError:
    return ConfigError(f"{printable(where)}: {what}", hint=hint)
