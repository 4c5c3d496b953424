"""Apply ``--include`` and ``--exclude`` to hosts and their slots. No I/O.

Both accept DeepSpeed's syntax and extensions of it::

    w0@w1:0,2        all of w0, and slots 0 and 2 of w1 (DeepSpeed's)
    w0,w1            commas between whole hosts
    n[01-04]:0-3,7   some slots of several hosts
    gpu*@*-ib:1      all of each host gpu*, and slot 1 of each host *-ib

In the name of a host, ``*`` matches any characters and ``?`` matches one. A host may be named
without its domain. An IPv6 address needs brackets. ``--include`` chooses among all hosts, then
``--exclude`` removes some of the chosen ones (DeepSpeed accepts only one of the two). The order of
the hosts does not change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.host_list import expand_item, fold_hosts
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import format_ranks, printable, quoted
from distlaunch.planning.allocation import Host
from distlaunch.planning.hosts.hostfile import MOST_SLOTS

_HINT = "write w0@w1:0,2 (@ between hosts, then slots), n[01-04]:0-3 or gpu*"
_MOST_GLOBS = 1_000
"""Largest number of patterns in one filter. Each is compared with every host."""
_COMPARED = 200
"""How many names are compared closely for a suggestion."""
_LONGEST = 80
_HEAD = re.compile(r"(?:[^:\[\]]+|\[[^\[\]]*\])*")
_PIECE = re.compile(r"(?:[^,\[\]]+|\[[^\[\]]*\])*")
_ADDRESS = re.compile(r"\[([^\[\]]*:[^\[\]]*)\]")
_SLOTS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_NOTHING: frozenset[int] = frozenset()


class Chosen(Record):
    """A host that the filters left."""

    host: Host
    index: int
    """Index of the host before filtering."""
    slots: tuple[int, ...] | None
    """The chosen slots, ascending. None if their number is unknown and the filter names none."""
    without: tuple[int, ...] = ()
    """If ``slots`` is None: the slots to exclude once their number is known."""


def apply_filters(
    hosts: Sequence[Host], include: str | None, exclude: str | None
) -> tuple[Chosen, ...]:
    """Return the hosts that remain after the filters, in their order.

    Raises ConfigError for an invalid filter, a filter that matches no host, a slot that its host
    does not have, and if no host remains.
    """
    lookup = _HostLookup(hosts)
    included = None if include is None else _slots_by_host(include, str(Opt.INCLUDE), lookup)
    excluded = {} if exclude is None else _slots_by_host(exclude, str(Opt.EXCLUDE), lookup)
    # Most hosts are filtered alike and share the result.
    known: dict[tuple[int | None, frozenset[int] | None, frozenset[int]], tuple[int, ...]] = {}
    left: list[Chosen] = []
    for index, host in enumerate(hosts):
        picked = None if included is None else included.get(index, _NOTHING)
        gone = excluded.get(index, _NOTHING)
        if gone is None:
            continue
        key = host.slots, picked, gone
        if key not in known:
            known[key] = _slots_left(*key)
        if picked is None and host.slots is None:
            left.append(Chosen(host=host, index=index, slots=None, without=known[key]))
        elif known[key]:
            left.append(Chosen(host=host, index=index, slots=known[key], without=()))
    if not left:
        given = ((str(Opt.INCLUDE), include), (str(Opt.EXCLUDE), exclude))
        said = " and ".join(f"{name} {quoted(text)}" for name, text in given if text is not None)
        raise ConfigError(f"{said or 'no filter'}: no host is left", hint=_list_hosts(lookup.names))
    return tuple(left)


def _slots_left(
    count: int | None, picked: frozenset[int] | None, gone: frozenset[int]
) -> tuple[int, ...]:
    """Return the remaining slots of a host; the excluded ones if their number is unknown."""
    if picked is None:
        return (
            tuple(sorted(gone))
            if count is None
            else tuple(slot for slot in range(count) if slot not in gone)
        )
    return tuple(sorted(picked - gone))


class _HostLookup:
    """Finds hosts by name, with or without the domain, ignoring case. A host of unknown name is
    never found."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = hosts
        self.names = [host.name.lower() if host.known else "" for host in hosts]
        self._exact = {name: index for index, name in enumerate(self.names) if name}
        self._short: dict[str, list[int]] = {}
        for index, name in enumerate(self.names):
            if "." in name and name.strip("0123456789."):
                self._short.setdefault(name.partition(".")[0], []).append(index)

    def find(self, name: str) -> list[int]:
        """Return the host of this name, or all hosts of this name in some domain."""
        index = self._exact.get(name.lower())
        return self._short.get(name.lower(), []) if index is None else [index]

    def matching(self, glob: str) -> list[int]:
        """Return the hosts that match a pattern with ``*`` and ``?``."""
        import fnmatch

        fits = re.compile(fnmatch.translate(glob.lower())).match  # takes linear time
        whole = "." in glob
        return [
            p
            for p, name in enumerate(self.names)
            if fits(name) or (not whole and fits(name.partition(".")[0]))
        ]


def _slots_by_host(text: str, option: str, lookup: _HostLookup) -> dict[int, frozenset[int] | None]:
    """Return the slots that a filter names, by the index of the host; None is the whole host.

    Raises ConfigError.
    """
    found: dict[int, frozenset[int] | None] = {}
    globs = 0
    for item in text.split("@"):
        patterns, slots = _parse_item(item.strip(), text, option)
        for pattern in patterns:
            if "*" in pattern or "?" in pattern:
                globs += 1
                if globs > _MOST_GLOBS:
                    raise _filter_error(
                        option, text, f"there are more than {_MOST_GLOBS:,} patterns"
                    )
                indices = lookup.matching(pattern)
            else:
                indices = lookup.find(pattern)
                if len(indices) > 1:
                    both = " and ".join(printable(lookup.names[index]) for index in indices[:2])
                    raise _filter_error(
                        option,
                        text,
                        f"{quoted(pattern)} may be {both}",
                        "add the domain of the host",
                    )
            if not indices:
                raise _filter_error(
                    option,
                    text,
                    f"there is no host {quoted(pattern)}",
                    _suggest_host(pattern, lookup.names),
                )
            for index in indices:
                _check_slots(slots, lookup.hosts[index], option, text)
                before = found.get(index, _NOTHING)
                found[index] = (
                    None
                    if slots is None or before is None
                    else (before | slots if before else slots)
                )
    return found


def _parse_item(item: str, text: str, option: str) -> tuple[list[str], frozenset[int] | None]:
    """Return the host patterns of one item, with ranges expanded, and its slots; None for all.
    Raises ConfigError."""
    if not item:
        raise _filter_error(option, text, "a host is missing")
    address = _ADDRESS.match(item)
    head = address or _HEAD.match(item)
    end = head.end() if head else 0
    rest = item[end:]
    if rest[:1] in {"[", "]"}:
        raise _filter_error(option, item, "a bracket is not closed")
    if ":" in rest[1:]:
        raise _filter_error(
            option,
            item,
            "it has more than one colon",
            "an IPv6 address needs brackets: [fe80::1]:0,2",
        )
    if not end or rest[:1] not in {"", ":"}:
        raise _filter_error(
            option, item, "a host is missing" if not end else "expected :SLOTS after the address"
        )
    slots = _parse_slots(rest[1:], item, option) if rest else None
    if address:
        return [address[1]], slots
    words = [word.strip() for word in _split_at_commas(item[:end])]
    if slots is not None and len(words) > 1:
        raise _filter_error(
            option,
            item,
            "it names slots for several hosts at once",
            "write w0:0,1@w1:0,1 or w[0-1]:0,1",
        )
    if not all(words):
        raise _filter_error(option, item, "a host is missing")
    return [name for word in words for name in expand_item(word, where=option, also="*?")], slots


def _split_at_commas(hosts: str) -> Iterator[str]:
    start = 0
    while start <= len(hosts):
        match = _PIECE.match(hosts, start)
        end = match.end() if match else start
        yield hosts[start:end]
        start = end + 1


def _parse_slots(said: str, item: str, option: str) -> frozenset[int]:
    slots: set[int] = set()
    named = 0
    for part in said.split(","):
        match = _SLOTS.fullmatch(part.strip())
        if match is None:
            raise _filter_error(option, item, f"{quoted(part)} is not a slot or a range of slots")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise _filter_error(option, item, f"the range {quoted(part)} ends before it starts")
        if last >= MOST_SLOTS:
            raise _filter_error(option, item, f"{quoted(part)} is more than any host has")
        named += last - first + 1
        if named > MOST_SLOTS:
            raise _filter_error(option, item, "it names more slots than any host has")
        slots.update(range(first, last + 1))
    return frozenset(slots)


def _check_slots(slots: frozenset[int] | None, host: Host, option: str, text: str) -> None:
    if slots is None or host.slots is None:
        return
    highest = max(slots)
    if highest >= host.slots:
        has = format_ranks(range(host.slots))
        raise _filter_error(
            option,
            text,
            f"{printable(host.name)} has no slot {highest}",
            f"it has {has}, counted from 0",
        )


def _suggest_host(wanted: str, names: Sequence[str]) -> str:
    import difflib
    import heapq

    wanted = wanted.lower()
    alike = heapq.nlargest(_COMPARED, names, key=lambda name: _common_prefix_length(name, wanted))
    close = difflib.get_close_matches(wanted, alike, n=1, cutoff=0.4)
    return f"do you mean {quoted(close[0])}? {_list_hosts(names)}" if close else _list_hosts(names)


def _common_prefix_length(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _list_hosts(names: Iterable[str]) -> str:
    known = [name for name in names if name]
    folded = fold_hosts(known)
    if not folded:
        return "no host's name is known here; * stands for all"
    there = "there is" if len(known) == 1 else "there are"
    return f"{there} {folded}" if len(folded) <= _LONGEST else f"{there} {folded[:_LONGEST]}..."


def _filter_error(option: str, text: str, what: str, hint: str = _HINT) -> ConfigError:
    return ConfigError(f"{option} {quoted(text)}: {what}", hint=hint)
