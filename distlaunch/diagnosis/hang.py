"""Find from the stacks of hung workers which ranks the others wait for, and describe where they
are. No I/O.

Ranks whose stacks are equal in all that matters form a group. The first rule that applies gives the
ranks that hold up the others:

* Ranks whose process is stopped, traced, stuck in the kernel, or a zombie.
* Ranks that have ended with 0, if all running ranks surely wait for others.
* Ranks that wait for other ranks less certainly than the remaining ranks.
* Ranks of which this is not known, if the remaining ranks surely wait for others.
* Ranks at the lowest step, or else the smallest group.

Steps come last, because heartbeats are rare and the last heartbeat of a rank may be some steps old.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal

from distlaunch.core.model.duration import format_duration
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import counted, format_ranks, name_ranks, printable
from distlaunch.core.protocol import agent_messages as m
from distlaunch.diagnosis.clean_text import shorten
from distlaunch.diagnosis.stack_parser import StackView, ThreadStack, main_thread, parse_stacks
from distlaunch.diagnosis.waits import Wait, Waiting, find_wait, hint_for_all, hint_for_place

_WIDTH = 100
_GROUPS = 6
_RECORDED = 32
"""Number of groups and frames in the record."""
_LINES = 8
_LINES_OF_REQUEST = 60
"""Number of frames that are shown to a user who has asked for stacks."""
_LINES_OTHERS = 4
_THREADS = 3
_ODD_STATES: tuple[Kind, ...] = ("stopped", "traced", "kernel", "zombie")
"""Process states that hold up all ranks, the most certain first."""
_STATE_TEXTS: Mapping[Kind, str] = {
    "stopped": "stopped (state T): somebody sent SIGSTOP",
    "traced": "held by a debugger or tracer (state t)",
    "kernel": "stuck in the kernel (state D): a file system or a driver does not answer",
    "zombie": "ended, but still there as a zombie (state Z): a thread or the kernel holds on to it",
}
Kind = Literal[
    "stack", "stopped", "traced", "kernel", "zombie", "gone", "hidden", "silent", "unanswered"
]
_MOST = 200
"""Largest number of different stacks that are distinguished by line. With more, only functions
count."""
_RANKS_CHARS = 48
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_Seen = tuple[StackView | None, Wait | None, list[ThreadStack]]
"""The main thread's stack, its call that waits for other ranks, and the stacks of all other
threads."""
_KINDS: dict[str, Kind] = {
    "T": "stopped",
    "t": "traced",
    "D": "kernel",
    "Z": "zombie",
    "X": "gone",
    "": "gone",
}
"""Process states that explain more than a stack."""


class HangDiagnosis(Record):
    """The values for the report and for the restart rule."""

    behind: tuple[int, ...]
    """The ranks that the others wait for, which may have ended."""
    frame: str | None
    """Innermost frame of the user's code, ``train.py:42 in step``: of the ranks behind, or else of
    the first group."""
    headline: str
    """The first line of the report."""
    text: str
    """The report: several lines without control characters."""
    places: str
    """The lines of the report with the places of the ranks."""
    summary: str
    """The ranks that are behind, as one line."""
    signature: tuple[str, str] | None
    """Equal for two attempts that hang at the same line."""
    record: Mapping[str, object]
    """The diagnosis for ``events.jsonl``, as described at ``_record``."""
    others_wait: bool
    """Whether ranks are behind, and all other running ranks wait for others."""


def diagnose_hang(
    stacks: Sequence[m.Stack],
    *,
    world_size: int,
    silent_s: float,
    heartbeats: Mapping[int, Mapping[str, float]],
    ended: Sequence[int],
    hosts: Callable[[int], str],
    script_dir: str,
    output_came: bool = False,
    by_steps: bool = False,
) -> HangDiagnosis:
    """Return the diagnosis of a hang.

    ``stacks``: those of every running worker. A rank that is neither there nor in ``ended`` (exit
    code 0) has not answered. ``heartbeats``: the last heartbeat of each rank, of which ``step`` is
    used. ``script_dir``: files below it are the user's own. ``output_came``: workers that report
    heartbeats have written output, which does not count for them. ``by_steps``: ``silent_s`` is the
    time in which no rank has reached another step, although ranks wrote or reported.
    """
    gone = sorted(set(ended))
    groups = _group_by_place(stacks, script_dir)
    known = {stack.rank for stack in stacks}.union(gone)
    if missing := [rank for rank in range(world_size) if rank not in known]:
        groups.append(_Group("unanswered", "", None, None, [], ranks=missing))
    steps = {rank: values["step"] for rank, values in heartbeats.items() if "step" in values}
    verdict = _judge(groups, gone, steps, world_size)
    behind = set(verdict.groups)
    groups.sort(
        key=lambda group: (
            group not in behind,
            group.kind not in _ODD_STATES,
            len(group.ranks),
            group.ranks[0],
        )
    )
    places = _HostNames(hosts, [rank for group in groups for rank in group.ranks])
    frame = next((group.frame for group in verdict.groups or groups if group.frame), None)
    several = world_size - len(gone) > 1
    who = f"any of {counted(world_size - len(gone), 'worker')}" if several else "the only worker"
    who += f" that still {'run' if several else 'runs'}" if gone else ""
    missed, came = ("heartbeat", " (output still came)") if output_came else ("sign of life", "")
    head = f"hang: no {missed} from {who} for {format_duration(silent_s)}{came}"
    if by_steps:
        head = f"hang: no new step from {who} for {format_duration(silent_s)}, though there are signs of life"
    computing = _busy_hint(verdict.groups or groups, {stack.rank: stack.state for stack in stacks})
    not_output = (
        "output does not count once a worker has sent a heartbeat: send them during evaluation and "
        f"checkpoints too, or choose a longer {Opt.HANG_TIMEOUT}"
    )
    hints = [
        hint for hint in (not_output if output_came else None, verdict.hint, computing) if hint
    ]
    lines = _wrapped(verdict.words)
    for group in groups[:_GROUPS]:
        lines += _described(
            group, places, detailed=group in behind or len(groups) == 1, script_dir=script_dir
        )
    if len(groups) > _GROUPS:
        rest = [rank for group in groups[_GROUPS:] for rank in group.ranks]
        lines.append(f"  and {counted(len(groups) - _GROUPS, 'other place')}: {_short_ranks(rest)}")
    if gone:
        lines.append(f"  {_short_ranks(gone)} ended before, with exit code 0")
    where = list(lines)
    for hint in hints:
        lines += _wrapped(f"hint: {hint}")
    return HangDiagnosis(
        behind=verdict.ranks,
        frame=frame,
        headline=shorten(printable(head), _WIDTH),
        text=_text([head, *lines]),
        places=_text(where),
        summary=printable(verdict.words),
        signature=("hang", frame) if frame else None,
        record={
            **_record(groups, verdict, frame, gone, steps),
            "silent_s": silent_s,
            "by_steps": by_steps,
            "output_came": output_came,
            "hint": "; ".join(hints) or None,
        },
        others_wait=_others_wait(groups, verdict),
    )


def _others_wait(groups: Sequence[_Group], verdict: _Verdict) -> bool:
    others = [group for group in groups if group not in verdict.groups and group.kind != "gone"]
    waiting = [group for group in others if group.waiting not in (None, Waiting.NOT)]
    return bool(verdict.ranks) and bool(others) and len(waiting) == len(others)


class StackPlaces(Record):
    """Where the workers of a running job are."""

    text: str
    """A paragraph for each group of ranks with equal stacks."""
    groups: tuple[Mapping[str, object], ...]
    """The same as data, in the form of the ``groups`` of ``_record``, with ``hosts`` and ``pids``."""


def describe_places(
    stacks: Sequence[m.Stack],
    *,
    unanswered: Sequence[int],
    steps: Mapping[int, float],
    hosts: Callable[[int], str],
    script_dir: str,
    behind: Collection[int] = (),
) -> StackPlaces:
    """Return where workers are. Equal stacks are merged. Those of ranks that are behind come first,
    then those that differ, and last those of ranks that surely wait for others.

    ``unanswered``: ranks whose nodes have not answered. ``steps``: the last step of each rank.
    ``behind``: ranks in whose collectives others wait.
    """
    groups = _group_by_place(stacks, script_dir)
    if unanswered:
        groups.append(_Group("unanswered", "", None, None, [], ranks=sorted(unanswered)))
    groups.sort(
        key=lambda group: (
            group.kind not in _ODD_STATES,
            not any(rank in behind for rank in group.ranks),
            group.waiting is Waiting.SURELY,
            len(group.ranks),
            group.ranks[0],
        )
    )
    places = _HostNames(hosts, [rank for group in groups for rank in group.ranks])
    lines: list[str] = []
    for group in groups:
        lines += [
            line.removeprefix("  ")
            for line in _described(
                group, places, detailed=True, script_dir=script_dir, most=_LINES_OF_REQUEST
            )
        ]
    return StackPlaces(
        text="\n".join(shorten(printable(line).rstrip(), _WIDTH) for line in lines) + "\n",
        groups=tuple(
            {
                **_entry(group, steps),
                "hosts": sorted({hosts(rank) for rank in group.ranks}),
                "pids": group.pids,
            }
            for group in groups
        ),
    )


class _Group:
    """Ranks whose stacks are equal in all that matters."""

    __slots__ = ("kind", "pids", "ranks", "state", "threads", "view", "wait")

    def __init__(
        self,
        kind: Kind,
        state: str,
        view: StackView | None,
        wait: Wait | None,
        threads: list[ThreadStack],
        *,
        ranks: Sequence[int] = (),
    ) -> None:
        self.kind = kind
        self.state = state
        self.view = view
        self.wait = wait
        self.threads = threads
        """All threads of the group's first rank except the main thread."""
        self.ranks = list(ranks)
        self.pids: list[int] = []

    def add(self, stack: m.Stack) -> None:
        at = bisect(self.ranks, stack.rank)
        self.ranks.insert(at, stack.rank)
        self.pids.insert(at, stack.pid)

    @property
    def waiting(self) -> Waiting | None:
        """How certainly the group waits for other ranks, if known."""
        if self.view is None or self.view.place is None:
            return None
        return self.wait.waiting if self.wait else Waiting.NOT

    @property
    def frame(self) -> str | None:
        """The innermost frame of the user's code."""
        return str(self.view.place) if self.view and self.view.place else None


def _group_by_place(stacks: Sequence[m.Stack], script_dir: str) -> list[_Group]:
    """Return the ranks grouped by stack. With more than ``_MOST`` groups, only functions are
    compared."""
    seen: dict[str, _Seen] = {}  # most ranks' stacks differ in their threads' addresses only
    found = []
    for stack in stacks:
        text = _ADDRESS.sub("0x0", stack.text)
        if (one := seen.get(text)) is None:
            one = seen[text] = _read(text, script_dir, stack.source)
        found.append((stack, _kind(stack.state, one), *one))
    groups = _merged(found, by_line=True)
    if len(groups) > _MOST:
        groups = _merged(found, by_line=False)
    return groups


class _HostNames:
    """Names the hosts of ranks, if the job has several hosts."""

    def __init__(self, hosts: Callable[[int], str], ranks: Sequence[int]) -> None:
        self._host = {rank: hosts(rank) for rank in ranks}
        self._many = len(set(self._host.values())) > 1

    def on_host(self, ranks: Sequence[int]) -> str:
        """Return the host of some ranks as `` on node3``; empty if it would not help."""
        names = sorted({self._host[rank] for rank in ranks})
        return f" on {names[0]}" if self._many and len(names) == 1 else ""


def _short_ranks(ranks: Sequence[int]) -> str:
    """Return the names of ranks, with their number if the list is long."""
    text = name_ranks(ranks)
    return (
        text
        if len(text) <= _RANKS_CHARS
        else f"{len(ranks)} ranks ({shorten(format_ranks(ranks), _RANKS_CHARS)})"
    )


def _is_or_are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _has_or_have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _judge(
    groups: Sequence[_Group], ended: Sequence[int], steps: Mapping[int, float], world_size: int
) -> _Verdict:
    """Return which ranks hold up the others, by the rules in the module's docstring."""
    for kind in _ODD_STATES:
        odd = [group for group in groups if group.kind == kind]
        if odd:
            group = odd[0]
            words = f"{_short_ranks(group.ranks)} {_is_or_are(group.ranks)} {_STATE_TEXTS[kind]}"
            return _blame([group], words, _state_hint(group))
    running = [group for group in groups if group.kind != "gone"]
    surely = [group for group in running if group.waiting is Waiting.SURELY]
    if ended and surely and len(surely) == len(running):
        waits = " and ".join(dict.fromkeys(group.wait.name for group in surely if group.wait))
        them = "it" if len(ended) == 1 else "them"
        words = (
            f"{_short_ranks(ended)} {_has_or_have(ended)} ended with exit code 0, and the others "
            "wait for "
            f"{them}, in {waits}"
        )
        hint = "do all ranks run the same number of steps, and the same code after the last one?"
        return _Verdict(groups=(), ranks=tuple(ended), words=words, hint=hint)
    known = [group for group in running if group.waiting is not None]
    levels = sorted({group.waiting for group in known if group.waiting is not None})
    if len(levels) > 1:
        return _judge_places(
            [group for group in known if group.waiting == levels[0]], running, steps
        )
    unknown = [group for group in running if group.waiting is None]
    if unknown and levels == [Waiting.SURELY]:
        return _judge_places(unknown, running, steps)
    if len(running) == 1:
        return _judge_one_place(running[0], steps, world_size)
    if levels == [Waiting.SURELY] and len({group.wait.name for group in running if group.wait}) > 1:
        return _judge_collectives(running, steps)
    return _judge_places(_lowest(running, steps) or _smallest(running), running, steps)


class _Verdict(Record):
    """The ranks that are behind, and the texts about them."""

    groups: tuple[_Group, ...]
    """The groups of the ranks that are behind."""
    ranks: tuple[int, ...]
    words: str
    hint: str | None


def _blame(groups: Sequence[_Group], words: str, hint: str | None) -> _Verdict:
    ranks = sorted(rank for group in groups for rank in group.ranks)
    return _Verdict(groups=tuple(groups), ranks=tuple(ranks), words=words, hint=hint)


def _state_hint(group: _Group) -> str:
    """Return a hint for the state of a group's processes.

    The user reads it after the worker was killed, unless it is stuck in the kernel.
    """
    hints: Mapping[Kind, str] = {
        "stopped": "who stops it? A `kill -STOP`, a scheduler that suspends jobs, or the script "
        "itself;"
        " as long as a worker is there, `kill -CONT` and its pid have it go on",
        "traced": "who traces it? gdb, strace and the like; as long as a worker is there, "
        "TracerPid in /proc/PID/status"
        " names the debugger",
        "kernel": "`dmesg` and the network mounts (`mount`, `df`) tell what it waits for, and as "
        "long as it is there"
        f" /proc/{group.pids[0]}/stack",
    }
    return hints.get(
        group.kind, f"see `dmesg`, and as long as it is there what /proc/{group.pids[0]}/task holds"
    )


def _judge_places(
    found: Sequence[_Group], running: Sequence[_Group], steps: Mapping[int, float]
) -> _Verdict:
    if not found:
        words = (
            f"no rank stands out: they stand at {len(running)} places"
            if running
            else "no worker could be asked"
        )
        return _Verdict(groups=(), ranks=(), words=words, hint=_place_hint(running))
    found = sorted(found, key=lambda group: (len(group.ranks), group.ranks[0]))
    ranks = sorted(rank for group in found for rank in group.ranks)
    others = [rank for group in running if group not in found for rank in group.ranks]
    where = f", at {found[0].frame}" if found[0].frame else ""
    words = (
        f"{_short_ranks(ranks)} {_is_or_are(ranks)} behind{_at_steps(ranks, others, steps)}{where}"
    )
    return _blame(found, words, _place_hint(found))


def _place_hint(groups: Sequence[_Group]) -> str | None:
    found = (hint_for_place(group.view) for group in groups if group.view)
    return next((hint.text for hint in found if hint), None)


def _at_steps(ranks: Sequence[int], others: Sequence[int], steps: Mapping[int, float]) -> str:
    own, theirs = _span(ranks, steps), _span(others, steps)
    if own is None:
        return ""
    return (
        f" (at least at step {own}{'' if theirs in (None, own) else f', the others at {theirs}'})"
    )


def _span(ranks: Iterable[int], steps: Mapping[int, float]) -> str | None:
    """Return the steps of these ranks as ``7`` or ``7-9``; None if no step is known."""
    told = [steps[rank] for rank in ranks if rank in steps]
    if not told:
        return None
    low, high = f"{min(told):.15g}", f"{max(told):.15g}"
    return low if low == high else f"{low}-{high}"


def _judge_one_place(group: _Group, steps: Mapping[int, float], world_size: int) -> _Verdict:
    """Return the verdict if all ranks have the same stack."""
    waits = f" in {group.wait.name}" if group.wait else ""
    where = (
        f"{waits}{_at_steps(group.ranks, (), steps)}{f', at {group.frame}' if group.frame else ''}"
    )
    hint = (hint_for_all([group.wait]) if group.wait else None) or _place_hint([group])
    if group.view is None:
        they = "it stands" if len(group.ranks) == 1 else "they stand"
        return _Verdict(
            groups=(), ranks=(), words=f"where {they} cannot be told from here", hint=hint
        )
    if len(group.ranks) > 1:
        words = f"all {len(group.ranks)} stand at the same place{where}"
        return _Verdict(groups=(), ranks=(), words=words, hint=hint)
    words = (
        f"{'it' if world_size == 1 else _short_ranks(group.ranks)} "
        f"stands{where.replace(',', '', 1)}"
    )
    return (
        _blame([group], words, hint)
        if world_size == 1
        else _Verdict(groups=(), ranks=(), words=words, hint=hint)
    )


def _judge_collectives(running: Sequence[_Group], steps: Mapping[int, float]) -> _Verdict:
    """Return the verdict on ranks that wait for each other in different collectives."""
    found = _lowest(running, steps) or _smallest(running)
    hint = hint_for_all([group.wait for group in running if group.wait])
    if not found:
        return _Verdict(
            groups=(),
            ranks=(),
            words="ranks wait for each other in different collectives",
            hint=hint,
        )
    ranks = sorted(rank for group in found for rank in group.ranks)
    others = [group for group in running if group not in found]
    own, theirs = (
        " and ".join(dict.fromkeys(group.wait.name for group in groups if group.wait))
        for groups in (found, others)
    )
    at_steps = _at_steps(ranks, [rank for group in others for rank in group.ranks], steps)
    where = f", at {found[0].frame}" if found[0].frame else ""
    wait = "waits" if len(ranks) == 1 else "wait"
    return _blame(
        found,
        f"{_short_ranks(ranks)} {wait} in {own}{at_steps}{where}; the others in {theirs}",
        hint,
    )


def _lowest(groups: Sequence[_Group], steps: Mapping[int, float]) -> list[_Group]:
    """Return the groups at the lowest step, if the steps differ."""
    last = [
        (max((steps[rank] for rank in group.ranks if rank in steps), default=None), group)
        for group in groups
    ]
    told = sorted({step for step, _ in last if step is not None})
    return [group for step, group in last if step == told[0]] if len(told) > 1 else []


def _smallest(groups: Sequence[_Group]) -> list[_Group]:
    """Return the group that is smaller than all others, in a list.

    The list is empty if several are smallest, or if there is only one group.
    """
    sizes = sorted(len(group.ranks) for group in groups)
    return (
        [group for group in groups if len(group.ranks) == sizes[0]]
        if len(sizes) > 1 and sizes[0] < sizes[1]
        else []
    )


def _busy_hint(groups: Sequence[_Group], states: Mapping[int, str]) -> str | None:
    """Return a hint that the job may not hang, if the blamed ranks compute.

    They do if they do not wait for other ranks and all of their processes are running (state R).
    """
    ranks = [rank for group in groups for rank in group.ranks]
    if not ranks or any(group.waiting is Waiting.SURELY for group in groups):
        return None
    if any(states.get(rank) != "R" for rank in ranks):
        return None
    what = "it computes" if len(ranks) == 1 else "they compute"
    does = "it does" if len(ranks) == 1 else "they do"
    return (
        f"{what} (state R): is {Opt.HANG_TIMEOUT} too short for what {does}, or is that loop "
        "endless?"
    )


def _wrapped(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(
        printable(text),
        _WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
        break_on_hyphens=False,
    )


def _described(
    group: _Group, places: _HostNames, *, detailed: bool, script_dir: str, most: int = _LINES
) -> list[str]:
    """Return the lines on a group: its ranks, then its stack.

    With ``detailed``, the stack has at most ``most`` lines, and all threads of the first rank
    follow.
    """
    who = f"  {_short_ranks(group.ranks)}{places.on_host(group.ranks)}"
    if group.kind == "unanswered":
        return [f"{who}: no answer from {'its node' if len(group.ranks) == 1 else 'their nodes'}"]
    if group.kind == "gone":
        return [f"{who}: ended while the stacks were collected"]
    if group.kind == "hidden":
        return [f"{who}: its main thread is not in the dump (faulthandler shows 100 threads)"]
    if group.kind == "silent":
        why = (
            "no Python started by us, or with -S, -I or -E; or it closed our file, or blocks our "
            "signal"
        )
        return _wrapped(f"{who.strip()}: no stack ({_state(group)}): {why}")
    if group.kind in _ODD_STATES:
        who += f" ({_state(group)})"
    if group.wait is not None:
        who += f", in {group.wait.name}"
    if group.view is None:
        return [f"{who}: no stack as long as it is so"]
    if group.view.place is None:
        return [f"{who}: no Python frame: the interpreter is starting or ending"]
    lines = [f"{who}:"]
    stack = (
        group.view.shown(most, source=True)
        if detailed
        else group.view.shown(_LINES_OTHERS, brief=True)
    )
    lines += [f"      {line}" for line in stack]
    return lines + (_other_threads(group, script_dir) if detailed else [])


def _state(group: _Group) -> str:
    pid = f", pid {group.pids[0]}" if len(group.pids) == 1 else ""
    return (
        f"state {group.state}{pid}"
        if group.state.isalpha() and len(group.state) == 1
        else f"state unknown{pid}"
    )


def _other_threads(group: _Group, script_dir: str) -> list[str]:
    """Return lines on the other threads of the group's first rank.

    Those that run the user's code are listed, because the main thread may wait for them; the rest
    is counted.
    """
    lines: list[str] = []
    for thread in group.threads:
        view = StackView(thread, script_dir)
        if view.frames and len(lines) < _THREADS:
            name = f" {thread.name}" if thread.name else ""
            lines.append(f"      another thread{name}: {view.frames[0]}")
    if rest := len(group.threads) - len(lines):
        lines.append(f"      and {counted(rest, 'other thread')}")
    return lines


def _text(lines: Iterable[str]) -> str:
    return "\n".join(shorten(printable(line).rstrip(), _WIDTH) for line in lines) + "\n"


def _record(
    groups: Sequence[_Group],
    verdict: _Verdict,
    frame: str | None,
    ended: Sequence[int],
    steps: Mapping[int, float],
) -> dict[str, object]:
    """Return the diagnosis as data for JSON.

    Keys:

    * ``behind``, ``frame`` and ``summary``: as in the report.
    * ``ended``: ranks that had ended with 0.
    * ``groups``: an entry for each of the first 32 groups, with ``ranks``, ``kind`` (stack,
      stopped, traced, kernel, zombie, gone, hidden, silent, unanswered), ``waits_in`` (a
      collective, or null), ``frame`` (innermost frame of the user's code, or null), ``stack``
      (innermost first), ``steps`` ([lowest, highest], or null) and ``other_threads`` (of the first
      rank).
    * ``groups_left_out``: the number of further groups.
    """
    return {
        "behind": list(verdict.ranks),
        "frame": frame,
        "summary": verdict.words,
        "ended": list(ended),
        "groups": [_entry(group, steps) for group in groups[:_RECORDED]],
        "groups_left_out": max(0, len(groups) - _RECORDED),
    }


def _entry(group: _Group, steps: Mapping[int, float]) -> dict[str, object]:
    told = [steps[rank] for rank in group.ranks if rank in steps]
    return {
        "ranks": group.ranks,
        "kind": group.kind,
        "waits_in": group.wait.name if group.wait else None,
        "frame": group.frame,
        "stack": group.view.shown(_RECORDED) if group.view else [],
        "steps": [min(told), max(told)] if told else None,
        "other_threads": len(group.threads),
    }


def _read(text: str, script_dir: str, source: str) -> _Seen:
    threads = parse_stacks(text) if text else []
    main = main_thread(threads)
    view = StackView(main, script_dir, source) if main else None
    return (
        view,
        find_wait(view) if view else None,
        [thread for thread in threads if thread is not main],
    )


def _kind(state: str, seen: _Seen) -> Kind:
    view, _, others = seen
    kind = _KINDS.get(state)
    if kind is not None and not (kind == "gone" and view):
        return kind
    if view is not None:
        return "stack"
    return "hidden" if others else "silent"


def _merged(
    found: Sequence[tuple[m.Stack, Kind, StackView | None, Wait | None, list[ThreadStack]]],
    *,
    by_line: bool,
) -> list[_Group]:
    groups: dict[object, _Group] = {}
    for stack, kind, view, wait, threads in found:
        key: object = kind
        if view is not None and kind == "stack":
            place = view.place
            waits_in = wait.name if wait else None
            if (
                by_line
            ):  # what is waited for here tells ranks apart that are in the same call of a library
                hint = None if wait else hint_for_place(view)
                key = (view.key(waits_in, wait.frame if wait else None), hint and hint.text)
            else:
                key = (place and (place.file, place.function), waits_in)
        elif kind == "silent":
            key = (kind, stack.state)
        group = groups.get(key)
        if group is None:
            group = groups[key] = _Group(kind, stack.state, view, wait, threads)
        group.add(stack)
    return list(groups.values())
