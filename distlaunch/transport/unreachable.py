"""Write the error text for hosts that cannot be reached: a table with reasons, then hints. No I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence

from distlaunch.core.model.host_list import name_hosts
from distlaunch.core.model.record import Record
from distlaunch.transport.connect_errors import ConnectFailure

_MOST_ROWS = 20
_WIDEST = 40
_MOST_SCANNED = 600
"""Longest list of hosts in one ssh-keyscan command, in characters."""
_SHA256 = re.compile(r"SHA256:\S+")


class _Group(Record):
    """Hosts that fail in the same way."""

    rows: tuple[ConnectFailure, ...]

    @property
    def first(self) -> ConnectFailure:
        return self.rows[0]


def render(failures: Sequence[ConnectFailure]) -> str:
    """Return the table: a row for each host, then each hint once.

    The columns are host, address, user, step and reason. Of many hosts that fail in the same way,
    some have a row and one line names the rest. The largest groups come first, within 20 rows.
    """
    groups = _group_failures(failures)
    shown = _rows_per_group([len(group.rows) for group in groups])
    rows: list[ConnectFailure | str] = []
    for group, share in zip(groups, shown, strict=True):
        if share == 0:
            continue
        rows += group.rows[:share]
        if rest := group.rows[share:]:
            rows.append(
                f"and {len(rest):,} more like {group.first.host}: "
                f"{name_hosts(row.host for row in rest)}"
            )
    if left := [
        row for group, share in zip(groups, shown, strict=True) if share == 0 for row in group.rows
    ]:
        rows.append(f"and {len(left):,} more: {name_hosts(row.host for row in left)}")
    return "\n".join([*_table_lines(rows), *_hint_lines(groups)])


def _group_failures(failures: Sequence[ConnectFailure]) -> list[_Group]:
    groups: dict[tuple[str, str, str], list[ConnectFailure]] = {}
    for row in failures:
        groups.setdefault((row.step, row.user, _without_own_names(row.text, row)), []).append(row)
    return sorted(
        (_Group(rows=tuple(rows)) for rows in groups.values()), key=lambda group: -len(group.rows)
    )


def _without_own_names(text: str, row: ConnectFailure) -> str:
    """Return a text without names and addresses of this host, to compare it with the texts of
    other hosts."""
    place = row.address.rpartition(":")[0].strip("[]")
    for own in (row.address, row.host, place):
        if own:
            text = re.sub(rf"(?<![\w.-]){re.escape(own)}(?![\w-])", "HOST", text)
    return _SHA256.sub("KEY", text)


def _rows_per_group(sizes: list[int]) -> list[int]:
    """Return how many rows each group gets: one, then the remaining rows for the larger groups."""
    shares = [1 if number < _MOST_ROWS else 0 for number in range(len(sizes))]
    free = _MOST_ROWS - sum(shares)
    for number, size in enumerate(sizes):
        more = min(free, size - shares[number]) if shares[number] else 0
        shares[number] += more
        free -= more
    return shares


def _table_lines(rows: Sequence[ConnectFailure | str]) -> list[str]:
    """Return the rows of the table, without columns that are empty everywhere."""
    cells = [
        (row.host, row.address, row.user, row.step)
        for row in rows
        if isinstance(row, ConnectFailure)
    ]
    heads = ("HOST", "ADDRESS", "USER", "STEP")
    kept = [column for column in range(len(heads)) if any(cell[column] for cell in cells)]
    widths = {
        column: max(len(heads[column]), *(min(len(cell[column]), _WIDEST) for cell in cells))
        for column in kept
    }

    def line(values: tuple[str, ...], text: str) -> str:
        return "  " + "  ".join([*(values[column].ljust(widths[column]) for column in kept), text])

    lines = [line(heads, "WHAT")] if cells else []
    for row in rows:
        if isinstance(row, str):
            lines.append("  " + row)
        else:
            lines.append(line((row.host, row.address, row.user, row.step), row.text))
    return lines


def _hint_lines(groups: Sequence[_Group]) -> list[str]:
    """Return each hint once. Hints that differ only in the host are combined."""
    found: dict[str, list[ConnectFailure]] = {}
    for group in groups:
        for row in group.rows:
            if row.hint is not None:
                found.setdefault(_without_own_names(row.hint, row), []).append(row)
    lines = []
    for rows in found.values():
        hints = list(dict.fromkeys(row.hint for row in rows if row.hint is not None))
        hint = hints[0]
        if len(hints) > 1:
            hint = (
                _combined_scan(rows, hints)
                or f"{hint} (for {rows[0].host}; likewise for {len(rows) - 1:,} more)"
            )
        lines.append(f"  hint: {hint}")
    return lines


def _combined_scan(rows: Sequence[ConnectFailure], hints: Sequence[str]) -> str | None:
    """Return one ssh-keyscan hint for all these hosts; None if the command would be too long."""
    scans = list(dict.fromkeys(row.scan for row in rows if row.scan is not None))
    same = {(scan.port, scan.file) for scan in scans}
    if len(same) != 1 or len(scans) != len(hints):
        return None
    hosts = [scan.host for scan in scans]
    if len(" ".join(hosts)) > _MOST_SCANNED:
        return None
    return hints[0].replace(scans[0].command(), scans[0].command(hosts))
