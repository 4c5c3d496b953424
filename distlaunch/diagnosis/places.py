"""Workers that stand still, as groups of ranks at the same place."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from distlaunch.core.model.ids import format_ranks, name_ranks
from distlaunch.core.protocol import agent_messages as m
from distlaunch.diagnosis.clean_text import shorten
from distlaunch.diagnosis.stack_parser import ThreadStack, View, main_thread, parse_stacks
from distlaunch.diagnosis.waits import Wait, Waiting, find_wait, hint_for_place

Kind = Literal["stack", "stopped", "traced", "kernel", "zombie", "gone", "hidden", "silent", "unanswered"]

_MOST = 200
"""So many places are told apart; more merge by function, whatever the line."""
_RANKS_CHARS = 48
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_Seen = tuple[View | None, Wait | None, list[ThreadStack]]
"""The main thread's stack, what it waits in, and the other threads."""
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
    seen: dict[str, _Seen] = {}  # most ranks' stacks differ in their threads' addresses only
    found = []
    for stack in stacks:
        text = _ADDRESS.sub("0x0", stack.text)
        if (one := seen.get(text)) is None:
            one = seen[text] = _read(text, script_dir)
        found.append((stack, _kind(stack.state, one), *one))
    groups = _merged(found, by_line=True)
    if len(groups) > _MOST:
        groups = _merged(found, by_line=False)
    for group in groups:
        pairs = sorted(zip(group.ranks, group.pids, strict=True))
        group.ranks = [rank for rank, _ in pairs]
        group.pids = [pid for _, pid in pairs]
    return groups


def _merged(
    found: Sequence[tuple[m.Stack, Kind, View | None, Wait | None, list[ThreadStack]]], *, by_line: bool
) -> list[Group]:
    groups: dict[object, Group] = {}
    for stack, kind, view, wait, threads in found:
        key: object = kind
        if view is not None and kind == "stack":
            place = view.place
            waits_in = wait.name if wait else None
            if by_line:  # what is waited for here tells ranks apart that are in the same call of a library
                key = (view.key(waits_in, wait.frame if wait else None), None if wait else hint_for_place(view))
            else:
                key = (place and (place.file, place.function), waits_in)
        elif kind == "silent":
            key = (kind, stack.state)
        group = groups.get(key)
        if group is None:
            group = groups[key] = Group(kind, stack.state, view, wait, threads)
        group.ranks.append(stack.rank)
        group.pids.append(stack.pid)
    return list(groups.values())


def _read(text: str, script_dir: str) -> _Seen:
    threads = parse_stacks(text) if text else []
    main = main_thread(threads)
    view = View(main, script_dir) if main else None
    return view, find_wait(view) if view else None, [thread for thread in threads if thread is not main]


def _kind(state: str, seen: _Seen) -> Kind:
    view, _, others = seen
    kind = _KINDS.get(state)
    if kind is not None and not (kind == "gone" and view):
        return kind
    if view is not None:
        return "stack"
    return "hidden" if others else "silent"


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
