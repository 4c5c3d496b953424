"""Expand and fold lists of hosts in Slurm's notation (``n[01-04,07],login1``).

``scontrol`` is not called, because containers seldom have it. Results are those of ``scontrol show
hostnames`` (22.05), with two differences: a suffix after the last bracket is accepted
(``rack[1-2]-ib``), and input that scontrol turns into useless names is refused (``n[1``, ``n[1-]``,
``n[ 1-2]``, ``(null)``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import product

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.text import printable, quoted

MOST_IN_RANGE = 65_536
"""Largest number of hosts in one range, as in scontrol: ``n[0-65535]`` is accepted, ``n[0-65536]``
not."""
MOST_HOSTS = 262_144
"""Largest number of hosts in one list. Several groups multiply, so a short text could fill the
memory."""
_LONGEST_SHOWN = 80
_LONGEST_NAME = 253  # RFC 1035, written with dots
_LONGEST_NUMBER = (
    18  # digits without leading zeros: fits 64 bits; scontrol takes more and saturates
)

_TOKEN = re.compile(r"[\s,]+|((?:[^\s,\[\]]+|\[[^\[\]]*\])+)")
_GROUPS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_STRANGE = re.compile(r"[^A-Za-z0-9_.-]")
_DIGITS = re.compile(r"([0-9]+)")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_LIST_HINT = "a list of hosts looks like n1,n[02-04,07],rack[0-1]node[0-1]"
_NAME_HINT = (
    "a host name has letters, digits, dots, hyphens and underscores, and begins with no "
    "dot or hyphen"
)


def expand_nodelist(text: str, *, where: str) -> list[str]:
    """Return the host names of the list ``text``, in scontrol's order, with duplicates.

    With three or more groups the last one varies fastest, then the first, the second, and so on:
    ``x[1-2]y[1-2]z[1-2]`` begins x1y1z1, x1y1z2, x2y1z1. Items are separated by commas or blanks.
    Raises ConfigError if the list is malformed or names no host; the message begins with ``where``
    (a variable, or a file and line).
    """
    names: list[str] = []
    place = 0
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            raise _error(
                where,
                f"{quoted(text)}: the bracket at character {place + 1} has no partner",
                _LIST_HINT,
            )
        place = token.end()
        item = token[1]
        if item is None:
            continue
        names += expand_item(item, where=where, room=MOST_HOSTS - len(names))
    if not names:
        raise _error(where, f"{quoted(text)} names no host", _LIST_HINT)
    return names


def without_blanks_in_brackets(text: str) -> str:
    """Return the text with ``n[01, 02]`` as ``n[01,02]``."""
    if "[" not in text:
        return text
    pieces = [
        f"[{','.join(part.strip() for part in piece.split(','))}]" if place % 2 else piece
        for place, piece in enumerate(_GROUPS.split(text))
    ]
    return "".join(pieces)


def expand_item(item: str, *, where: str, room: int = MOST_HOSTS, also: str = "") -> list[str]:
    """Return the host names of one item, such as ``n[01-04]``.

    ``room`` is the largest number of names. ``also`` lists characters to accept beside those of
    host names. Raises ConfigError, which begins with ``where``, if the item is malformed or has too
    many names.
    """
    if "[" not in item and "]" not in item:
        if not _NAME.fullmatch(item):
            _check_characters(item, item, where, also)
        if len(item) > _LONGEST_NAME:
            raise _error(
                where,
                f"{quoted(item)} is longer than a host name may be ({_LONGEST_NAME})",
                _NAME_HINT,
            )
        if room < 1:
            raise _too_many(where, item)
        return [item]
    pieces = _GROUPS.split(item)
    literals, groups = pieces[::2], pieces[1::2]
    if any("[" in literal or "]" in literal for literal in literals):
        raise _error(where, f"{quoted(item)}: a bracket has no partner", _LIST_HINT)
    # Each group is replaced by a digit here: groups expand to digits.
    _check_characters("0".join(literals), item, where, also)
    if (
        sum(map(len, literals)) + len(groups) > _LONGEST_NAME
    ):  # checked before a long text is repeated for each number
        raise _error(
            where,
            f"{quoted(item)} stands for names that are too long ({_LONGEST_NAME})",
            _NAME_HINT,
        )
    count = 1
    values: list[list[str]] = []
    for group in groups:
        if count * group.count(",") >= room:  # each part is at least one host
            raise _too_many(where, item)
        ranges = [_parsed_range(part.strip(), item, where) for part in group.split(",")]
        count *= sum(last - first + 1 for first, last, _ in ranges)
        if count > room:
            raise _too_many(where, item)
        values.append(
            [name for first, last, width in ranges for name in _padded_numbers(first, last, width)]
        )
    names = _combine(literals, values)
    longest = max(map(len, names))
    if longest > _LONGEST_NAME:
        raise _error(
            where,
            f"{quoted(item)} stands for names that are too long ({_LONGEST_NAME})",
            _NAME_HINT,
        )
    return names


def name_hosts(names: Iterable[str]) -> str:
    """Return folded hosts for a message, shortened to fit one line."""
    folded = fold_hosts(names)
    return folded if len(folded) <= _LONGEST_SHOWN else f"{folded[:_LONGEST_SHOWN]}..."


def fold_hosts(names: Iterable[str]) -> str:
    """Return hosts in folded form: ``n[01-04,07],login1``. Expanding it gives the same names in the
    same order."""
    parts: list[str] = []
    run: list[list[str]] = []  # names with the same literals, split into literals and numbers
    varies: int | None = None  # index of the piece that differs among them
    for name in names:
        pieces = [name] if ":" in name else _DIGITS.split(name)
        if run and (place := _varying_piece(run, varies, pieces)) is not None:
            varies = place
            run.append(pieces)
            continue
        if run:
            parts.append(_fold_run(run, varies))
        run, varies = [pieces], None
    if run:
        parts.append(_fold_run(run, varies))
    return printable(",".join(parts))


def parse_counts(text: str, *, where: str = "counts") -> list[int]:
    """Return one count per node from Slurm's notation: ``2(x3),1`` becomes ``[2, 2, 2, 1]``.

    Raises ConfigError, which begins with ``where``, for another form or a count below 1.
    """
    hint = "counts per node look like 4, or 2(x3),1"
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise _error(where, f"{quoted(text)}: {quoted(part)} is no count", hint)
        count, times = int(match[1]), int(match[2] or 1)
        if not count or not times:
            raise _error(where, f"{quoted(text)}: {quoted(part)} says 0", hint)
        if len(counts) + times > MOST_HOSTS:
            raise _error(where, f"{quoted(text)} counts for more than {MOST_HOSTS:,} nodes", hint)
        counts += [count] * times
    return counts


def fold_counts(counts: Iterable[int | None]) -> str:
    """Return counts in Slurm's notation: ``2(x3),1``. A count of None is written ``?``."""
    runs: list[tuple[int | None, int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1] = count, runs[-1][1] + 1
        else:
            runs.append((count, 1))
    shown = (("?" if count is None else str(count), times) for count, times in runs)
    return ",".join(count if times == 1 else f"{count}(x{times})" for count, times in shown)


def _check_characters(name: str, item: str, where: str, also: str) -> None:
    """Raise ConfigError for a name that is no host name.

    It may become an argument of ``ssh``, where a leading hyphen would begin an option.
    """
    strange = next((char for char in _STRANGE.findall(name) if char not in also), None)
    if strange is not None:
        raise _error(
            where, f"{quoted(item)} has {quoted(strange)}, which no host name has", _NAME_HINT
        )
    if name[:1] in {"", ".", "-"}:
        raise _error(where, f"{quoted(item)} is no host name", _NAME_HINT)


def _parsed_range(part: str, item: str, where: str) -> tuple[int, int, int]:
    """Return first, last and width. The width is 0 if the first number has no leading zero. Raises
    ConfigError."""
    match = _RANGE.fullmatch(part)
    if match is None:
        what = f"{quoted(part)} is no number or range" if part else "an entry in brackets is empty"
        raise _error(
            where,
            f"{quoted(item)}: {what}",
            "in brackets stand numbers and ranges: [1-4,08]; no steps",
        )
    low, high = match[1], match[2] or match[1]
    if (
        max(len(low), len(high)) > _LONGEST_NAME
        or max(map(len, (low.lstrip("0"), high.lstrip("0")))) > _LONGEST_NUMBER
    ):
        raise _error(where, f"{quoted(item)}: {quoted(part)} is too large", _LIST_HINT)
    first, last = int(low), int(high)
    if last < first:
        raise _error(
            where,
            f"{quoted(item)}: the range {quoted(part)} runs backwards",
            "write the smaller number first",
        )
    if last - first >= MOST_IN_RANGE:
        raise _error(
            where,
            f"{quoted(item)}: the range {quoted(part)} has more than {MOST_IN_RANGE:,} hosts",
            "divide the range",
        )
    return first, last, len(low) if low[0] == "0" else 0


def _padded_numbers(first: int, last: int, width: int) -> list[str]:
    if not width:
        return list(map(str, range(first, last + 1)))
    return [f"{number:0{width}d}" for number in range(first, last + 1)]


def _combine(literals: Sequence[str], values: Sequence[Sequence[str]]) -> list[str]:
    """Return all combinations of literals and values, in the order of ``expand_nodelist``."""
    *slower, last = values
    *heads, before, after = literals
    if not slower:
        return [before + value + after for value in last]
    names: list[str] = []
    for chosen in product(*reversed(slower)):
        head = "".join(map("".join, zip(heads, reversed(chosen), strict=True))) + before
        names += [head + value + after for value in last]
    return names


def _varying_piece(run: list[list[str]], varies: int | None, pieces: list[str]) -> int | None:
    """Return the index of the only number in which a name differs from the names of the run.

    ``varies`` is that index for the run so far, None for a run of one name. Return None if the name
    does not belong to the run: several pieces differ, or another number than ``varies``, or a text.
    """
    first = run[0]
    if len(first) != len(pieces):
        return None
    places = [place for place, (a, b) in enumerate(zip(first, pieces, strict=True)) if a != b]
    if not places and varies is not None:
        return varies
    if len(places) != 1 or varies not in {None, places[0]}:
        return None
    (place,) = places
    # Literals have even indexes. Too long numbers count as literals.
    fits = place % 2 == 1 and max(len(first[place]), len(pieces[place])) <= _LONGEST_NUMBER
    return place if fits else None


def _fold_run(run: list[list[str]], varies: int | None) -> str:
    first = run[0]
    if varies is None:
        return "".join(first)
    numbers = [pieces[varies] for pieces in run]
    ranges: list[str] = []
    start = 0
    for place in range(1, len(numbers) + 1):
        if (
            place < len(numbers)
            and place - start < MOST_IN_RANGE
            and _follows(numbers[start], numbers, place)
        ):
            continue
        low, high = numbers[start], numbers[place - 1]
        ranges.append(low if place - start == 1 else f"{low}-{high}")
        start = place
    return f"{''.join(first[:varies])}[{','.join(ranges)}]{''.join(first[varies + 1 :])}"


def _follows(low: str, numbers: list[str], place: int) -> bool:
    """Return whether the expansion that starts with ``low`` has this number next."""
    number = int(numbers[place - 1]) + 1
    return numbers[place] == (f"{number:0{len(low)}d}" if low[0] == "0" else str(number))


def _too_many(where: str, item: str) -> ConfigError:
    return _error(
        where, f"with {quoted(item)} there are more than {MOST_HOSTS:,} hosts", "check the ranges"
    )


def _error(where: str, what: str, hint: str) -> ConfigError:
    return ConfigError(f"{printable(where)}: {what}", hint=hint)
