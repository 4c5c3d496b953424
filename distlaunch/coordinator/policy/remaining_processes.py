"""Write texts about the processes that workers have left running. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

from distlaunch.core.model.host_list import name_hosts
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import counted, name_ranks, printable
from distlaunch.core.protocol.spawner_messages import Leftovers

_NAMED = 3
"""Largest number of processes that a line names. Further processes are counted."""
_COMMAND_CHARS = 80

ByHost = Mapping[str, Leftovers]
"""The leftovers by host. Hosts without leftovers may be included."""


def count_of(found: ByHost) -> int:
    """Return the number of processes in ``found``, on all hosts."""
    return sum(leftovers.count for leftovers in found.values())


def waiting_line(found: ByHost, *, linger_s: float, many_hosts: bool) -> str:
    """Return the notice about the leftover processes for which the launcher waits."""
    return (
        f"waiting up to {linger_s:,.10g} s ({Opt.LINGER}) for "
        f"{_named(found, many_hosts=many_hosts)}"
    )


def ended_line(ended: ByHost, killed: ByHost, *, many_hosts: bool) -> str:
    """Return the warning about leftover processes that were ended after a success: ``ended 2
    processes left by rank 0: a.sh (pid 7), ...``."""
    by_kill = count_of(killed)
    how = f", {by_kill:,} of them by KILL" if by_kill else ""
    return "ended " + _named(ended, many_hosts=many_hosts, how=how)


def killed_text(killed: ByHost, *, many_hosts: bool, after_grace: str | None = None) -> str:
    """Return the text about leftover processes that were killed in a stop: ``1 process left by rank
    0 had to be killed: train.py (pid 7)``."""
    return _named(
        killed,
        many_hosts=many_hosts,
        how=f" had to be killed{f' {after_grace}' if after_grace else ''}",
    )


def record_of(ended: ByHost, killed: ByHost) -> dict[str, object]:
    """Return the fields about leftover processes for ``events.jsonl``."""
    shown = [
        {"host": host, "rank": process.rank, "pid": process.pid, "command": process.command}
        for host, leftovers in ended.items()
        for process in leftovers.shown
    ]
    return {"ended": count_of(ended), "killed": count_of(killed), "processes": shown}


def _named(found: ByHost, *, many_hosts: bool, how: str = "") -> str:
    """Return the number of left processes, by whom they were left, and the first ones by name."""
    number = count_of(found)
    hosts = [host for host, leftovers in found.items() if leftovers.count]
    shown = [process for leftovers in found.values() for process in leftovers.shown]
    ranks = sorted({process.rank for process in shown if process.rank is not None})
    by = (
        name_ranks(ranks) if ranks and number == len(shown) else "workers"
    )  # others may have left the unnamed ones
    many_ranks = len(ranks) > 1
    names = [
        f"{printable(process.command[:_COMMAND_CHARS])} "
        f"({f'rank {process.rank}, ' if many_ranks and process.rank is not None else ''}pid "
        f"{process.pid})"
        for process in shown[:_NAMED]
    ]
    if number > len(names):
        names.append(
            f"and {counted(number - len(names), 'other')}"
            if names
            else counted(number, "unnamed one")
        )
    noun = "process" if number == 1 else "processes"
    return (
        f"{number:,} {noun} left by {by}{_on_hosts(hosts, many_hosts=many_hosts)}{how}: "
        f"{', '.join(names)}"
    )


def _on_hosts(hosts: list[str], *, many_hosts: bool) -> str:
    return f" on {name_hosts(hosts)}" if many_hosts and hosts else ""
