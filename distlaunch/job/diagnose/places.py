"""Layer job.diagnose: workers that stand still, as groups of ranks at the same place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from distlaunch.core.model.ids import format_ranks, name_ranks
from distlaunch.core.wire import messages as m
from distlaunch.job.diagnose.stacks import ThreadStack, View, main_thread, parse_stacks
from distlaunch.job.diagnose.text import shorten
from distlaunch.job.diagnose.waits import Wait, Waiting, find_wait

Kind = Literal["stack", "stopped", "traced", "kernel", "zombie", "gone", "hidden", "silent", "unanswered"]

_MOST = 200
"""So many places are told apart; more merge by function, whatever the line."""
_RANKS_CHARS = 48
_KINDS: dict[str, Kind] = {"T": "stopped", "t": "traced", "D": "kernel", "Z": "zombie", "X": "gone", "": "gone"}
"""What the letter of a process state says, where it says more than a stack."""


class Group:
    """Ranks at the same place."""

    __slots__ = ("kind", "pids", "ranks", "state", "threads", "view", "wait")

    def __init__(
        self, kind: Kind, state: str, view: View | None, wait: Wait | None, threads: list[ThreadStack]
    ) -> None:
        self.kind = kind
        self.state = state
        self.view = view
        self.wait = wait
        self.threads = threads
        """The other threads of its first rank."""
        self.ranks: list[int] = []
        self.pids: list[int] = []

    @property
    def waiting(self) -> Waiting | None:
        """How surely it waits for others; None if that cannot be told."""
        if self.view is None or self.view.place is None:
            return None
        return self.wait.waiting if self.wait else Waiting.NOT

    @property
    def frame(self) -> str | None:
        """The innermost frame of the user's code."""
        return str(self.view.place) if self.view and self.view.place else None


def group_by_place(stacks: Sequence[m.Stack], script_dir: str) -> list[Group]:
    """Put ranks at the same place together; should there be very many places, by function only."""
    found = [(stack, *_read(stack, script_dir)) for stack in stacks]
    groups = _merged(found, by_line=True)
    if len(groups) > _MOST:
        groups = _merged(found, by_line=False)
    for group in groups:
        pairs = sorted(zip(group.ranks, group.pids, strict=True))
        group.ranks = [rank for rank, _ in pairs]
        group.pids = [pid for _, pid in pairs]
    return groups


def _merged(found: Sequence[tuple[m.Stack, Kind, View | None, list[ThreadStack]]], *, by_line: bool) -> list[Group]:
    groups: dict[object, Group] = {}
    for stack, kind, view, threads in found:
        wait = find_wait(view) if view else None
        key: object = kind
        if view is not None and kind == "stack":
            place = view.place
            waits_in = wait.name if wait else None
            key = view.key(waits_in) if by_line else (place and (place.file, place.function), waits_in)
        elif kind == "silent":
            key = (kind, stack.state)
        group = groups.get(key)
        if group is None:
            group = groups[key] = Group(kind, stack.state, view, wait, threads)
        group.ranks.append(stack.rank)
        group.pids.append(stack.pid)
    return list(groups.values())


def _read(stack: m.Stack, script_dir: str) -> tuple[Kind, View | None, list[ThreadStack]]:
    threads = parse_stacks(stack.text) if stack.text else []
    main = main_thread(threads)
    others = [thread for thread in threads if thread is not main]
    view = View(main, script_dir) if main else None
    kind = _KINDS.get(stack.state)
    if kind is not None and not (kind == "gone" and view):
        return kind, view, others
    if view is not None:
        return "stack", view, others
    return ("hidden" if threads else "silent"), None, others


class Hosts:
    """Names hosts where there are several."""

    def __init__(self, hosts: Callable[[int], str], ranks: Sequence[int]) -> None:
        self._host = {rank: hosts(rank) for rank in ranks}
        self._many = len(set(self._host.values())) > 1

    def on_host(self, ranks: Sequence[int]) -> str:
        """Say where some ranks run, if that tells anything: `` on node3``."""
        names = sorted({self._host[rank] for rank in ranks})
        return f" on {names[0]}" if self._many and len(names) == 1 else ""


def named(ranks: Sequence[int]) -> str:
    """Name ranks, and count them where their list is long."""
    text = name_ranks(ranks)
    return text if len(text) <= _RANKS_CHARS else f"{len(ranks)} ranks ({shorten(format_ranks(ranks), _RANKS_CHARS)})"


def verb(ranks: Sequence[int]) -> str:
    """Give the verb for some ranks."""
    return "is" if len(ranks) == 1 else "are"


def has(ranks: Sequence[int]) -> str:
    """Give the verb for some ranks."""
    return "has" if len(ranks) == 1 else "have"
