"""Find the ranks that other ranks (the victims) waited for until a timeout. No I/O.

The awaited rank has raised no exception. It is found in one of these ways:

* A message of a library names it.
* It has ended with 0.
* It is behind, by the sequence numbers of NCCL's watchdog.
* Its NCCL heartbeat monitor has ended it, because the watchdog was stuck.
* Its stack shows that it is not in the collective.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum, auto

from distlaunch.core.model.record import Record, assert_never, replace
from distlaunch.core.model.text import name_ranks
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from distlaunch.diagnosis.consequence import Standing
from distlaunch.diagnosis.evidence import FailureEvidence
from distlaunch.diagnosis.failed_waits import (
    WaitingCall,
    call_of_wait,
    find_failed_wait,
    how_it_ended,
    how_they_stayed_away,
    what_they_missed,
)
from distlaunch.diagnosis.failure_kinds import Hint
from distlaunch.diagnosis.model import FailedWait, Mechanism, WaitKind
from distlaunch.diagnosis.stack_parser import StackView, ThreadStack, main_thread, parse_stacks
from distlaunch.diagnosis.waits import Wait, Waiting, find_wait, hint_for_place

_READ_BYTES = 16384
"""Texts of libraries are looked up in this many bytes at the end of stderr."""
_READ_RANKS = 256
"""The messages of this many ranks are compared."""
_NOTICED_S = 0.2
"""An exit may be noticed this much later than the failure of a rank that has lost the
connection."""
_STACK_LINES = 8
_PROGRESS = 2
"""Largest number of lines on NCCL work."""
_OUTERMOST = ("<module>", "_run_module_as_main")
"""Functions of a main thread's outermost frame while it runs a script."""
_ENDINGS = (
    ("/threading.py", "_shutdown"),
    ("/concurrent/futures/thread.py", "_python_exit"),
    ("/multiprocessing/util.py", "_exit_function"),
    ("/logging/__init__.py", "shutdown"),
    ("/weakref.py", "_exitfunc"),
)
"""Files and functions of the outermost frame when the interpreter ends."""
_RANKS = r"(\d+(?:, ?\d+)*)"
_NAMING: tuple[re.Pattern[str], ...] = (
    # torch 1.9 to 2.13: "[Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 2000 ms"
    re.compile(rf"\bRanks? {_RANKS} failed to pass monitoredBarrier"),
    # Horovod 0.16 to 0.28: "Stalled ops:allreduce.loss [missing ranks: 2, 3]"
    re.compile(rf"\[missing ranks: ?{_RANKS}\]"),
    # Horovod 0.19 to 0.28: "Missing ranks:\n2: [allreduce.noname.1]\n3: [allreduce.noname.1]"
    re.compile(r"Missing ranks:((?:\s*\d+: \[[^\]\n]*\](?: \.\.\.)?)+)"),
    # torch 1.11 to 2.13, TORCH_NCCL_DESYNC_DEBUG: "- To our best knowledge, ranks [2] are the
    # lagging ranks that caused this timeout."
    re.compile(rf"ranks \[{_RANKS}\] are the lagging ranks"),
)
_NAMING_NOW = (_NAMING[0], _NAMING[1], _NAMING[3])
"""Texts that come with the timeout, so that they count even for ranks that failed after it.
Horovod's warning of a stall may be old."""
_ITEM = re.compile(r"(?:^|[\n,])\s*(\d+)(?=[:,\s]|$)")
_WORK = re.compile(
    # torch 2.0 to 2.13: "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5,
    # OpType=ALLREDUCE, ...) ran for 600013 milliseconds before timing out."
    r"\[Rank (\d+)\] Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+)(?:[^)\n]*Timeout\(ms\)=(\d+))?"
)
_ENQUEUED = re.compile(
    # torch 2.4: "[PG 1 Rank 3] Timeout at NCCL work: 9141, last enqueued NCCL work: 9141, last
    # completed NCCL work: 9140."; 2.6: "[PG ID 0 PG GUID 0(default_pg) Rank 2] ... PG status: last
    # enqueued work: 120051, last completed work: 120048". The rank is that in the group.
    r"\[(?:PG (?:ID \S+ PG GUID )?(?P<group>[^\]\n]{1,80}?) )?Rank \d+\].{0,200}?"
    r"last enqueued (?:NCCL )?work: (?P<enqueued>\d+), last completed (?:NCCL )?work: "
    r"(?P<completed>\d+)"
)
_STUCK = re.compile(
    # torch 2.2: "[PG 0 Rank 1] Heartbeat monitor timed out! Process will be terminated after dumping
    # debug info."; 2.2 to 2.13: "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making
    # progress in monitoring enqueued collectives."
    r"watchdog got stuck for (\d+) seconds|Heartbeat monitor timed out! Process will be terminated"
)
_RAISED_IN = re.compile(
    # torch.distributed.checkpoint 1.13 to 2.13: "CheckpointException ranks:dict_keys([2])"
    rf"CheckpointException ranks: ?dict_keys\(\[{_RANKS}\]\)"
)
_FINGERPRINT = re.compile(
    # torch 1.11 to 2.13, TORCH_DISTRIBUTED_DEBUG=DETAIL: "Rank 1 is running collective:
    # CollectiveFingerPrint(SequenceNumber=3104, OpType=ALLREDUCE, TensorShape=[195812480], ..."
    r"Rank (\d+) is running (?:inconsistent )?collective: CollectiveFingerPrint\("
    r"(?:SequenceNumber=\d+,? ?)?OpType=(\w+)(?:, TensorShape=(\[[\d, ]*\]))?"
)


_PARAMETER_COUNTS = re.compile(
    # torch 1.10 to 2.13: "DDP expects same model across all ranks, but Rank 2 has 4 params, while
    # rank 0 has inconsistent 2 params."
    r"DDP expects same model across all ranks, but Rank (\d+) has (\d+) params, "
    r"while rank (\d+) has inconsistent (\d+) params"
)
_PARAMETER_SIZES = re.compile(
    # torch 1.8 to 2.13: "[1]: params[0] in this process with sizes [4, 4] appears not to match
    # sizes of the same param in process 0."
    r"\[(\d+)\]: params\[(\d+)\] in this process with sizes (\[[\d, ]*\]) appears not to match "
    r"sizes of the same param in process 0"
)


class Stall(Record):
    """Horovod's warning that names the missing ranks."""

    rank: int
    """The rank that wrote it."""
    text: str


class AwaitedState(Enum):
    """What awaited ranks did instead of what the others waited for."""

    AWAY = auto()
    """They did something else."""
    ENDED = auto()
    """They ended with 0."""
    OVER = auto()
    """They had come to the end of their script."""
    BEHIND = auto()
    """They had begun fewer collectives than the others."""
    STUCK = auto()
    """Their NCCL heartbeat monitor ended them."""
    ODD = auto()
    """They called something else, or gave it something else, than the others."""


class Awaited(Record):
    """The ranks that other ranks waited for."""

    ranks: tuple[int, ...]
    state: AwaitedState
    failed: tuple[int, ...] = ()
    """The ranks that waited in vain and failed."""
    odd: str = ""
    """If ``ODD``, a clause on the difference: ``called broadcast while rank 0 called barrier``."""
    inside: str | None = None
    """If ``AWAY``, the call in which these ranks waited."""
    wait: FailedWait | None = None
    """What the others waited in, if it is known."""
    frame: str | None = None
    """The innermost frame of the user's code in the first of these ranks."""
    stack: tuple[str, ...] = ()
    """The stack of the first of these ranks, shortened, innermost frame first."""
    place_hint: Hint | None = None
    """The hint for the library call in which the first of these ranks is."""
    progress: tuple[str, ...] = ()
    """Lines on the last NCCL work of these ranks."""
    stall: Stall | None = None

    @property
    def summary(self) -> str:
        """A clause on what the ranks did and on what the others waited in."""
        one = len(self.ranks) == 1
        them, wait = "it" if one else "them", self.wait
        how = how_it_ended(wait) if wait is not None else ""
        ended = f": {how}" if how else ""
        before = (
            f"while {name_ranks(self.failed)} waited for {them}"
            if wait is None
            else f"before {what_they_missed(wait)}"
        )
        match self.state:
            case AwaitedState.ODD:
                return f"{self.odd}{ended}"
            case AwaitedState.ENDED:
                return f"ended with exit code 0 {before}{ended}"
            case AwaitedState.OVER:
                script = "its script" if one else "their scripts"
                return f"had come to the end of {script} {before}{ended}"
            case AwaitedState.BEHIND:
                return f"{_order(self)}{ended}"
            case AwaitedState.STUCK:
                stuck = (
                    "" if wait is None or wait.timeout_s is None else f" for {wait.timeout_s:g} s"
                )
                if one:
                    return f"was ended by its NCCL heartbeat monitor: its watchdog was stuck{stuck}"
                return f"were ended by their NCCL heartbeat monitors: their watchdogs were stuck{stuck}"
            case AwaitedState.AWAY:
                inside = f", and waited in {self.inside}" if self.inside else ""
                if wait is None:
                    waited = f"{name_ranks(self.failed)} timed out waiting for {them}"
                    return f"did not take part{inside}: {waited}"
                return f"{how_they_stayed_away(wait)}{inside}{ended or ': they timed out'}"
            case _:
                assert_never(self.state)


def _order(awaited: Awaited) -> str:
    wait = awaited.wait
    if wait is None:
        return "had begun fewer collectives"
    verb, at = ("has", "it is") if len(awaited.ranks) == 1 else ("have", "they are")
    others = "is" if len(wait.ranks) == 1 else "are"
    call = f" ({wait.call})" if wait.call else ""
    return (
        f"{verb} the lowest sequence number: {at} at SeqNum {wait.last_sequence}, "
        f"{name_ranks(wait.ranks)} {others} at {wait.sequence}{call}"
    )


class _Place:
    """The stack of a rank, and the call in it that waits for other ranks."""

    def __init__(self, thread: ThreadStack | None, script_dir: str, source: str = "") -> None:
        self.outermost = thread.frames[-1] if thread and thread.frames else None
        self.view = StackView(thread, script_dir, source) if thread is not None else None
        self.wait: Wait | None = find_wait(self.view) if self.view else None

    @property
    def waits_surely(self) -> bool:
        return self.wait is not None and self.wait.waiting is Waiting.SURELY

    @property
    def call(self) -> str | None:
        return self.wait.name if self.wait is not None and self.waits_surely else None

    @property
    def waits_in(self) -> WaitingCall | None:
        return call_of_wait(self.wait)

    @property
    def is_over(self) -> bool:
        """Whether the script has ended, and the interpreter waits for something."""
        if self.outermost is None:
            return False
        name = self.outermost.function or ""
        return any(self.outermost.file.endswith(file) and name == end for file, end in _ENDINGS)

    @property
    def stack(self) -> tuple[str, ...]:
        """The stack, innermost frame first."""
        return tuple(self.view.shown(_STACK_LINES, source=True)) if self.view else ()

    @property
    def frame(self) -> str | None:
        place = self.view.place if self.view else None
        return str(place) if place else None


def find_awaited(
    victims: Sequence[FailureEvidence],
    ends: Sequence[WorkerExit],
    running: Sequence[int],
    stacks: Sequence[m.Stack],
    script_dir: str,
) -> Awaited | None:
    """Return the ranks that the victims waited for, if they can be determined.

    ``ends`` are all exits of the attempt, ``running`` the ranks that have not exited. ``stacks``
    are those of the workers that were running when the first victim failed. Files below
    ``script_dir`` are the user's own.
    """
    failed = {one.end.rank for one in victims}
    if not failed:
        return None
    logs = {
        end.rank: end.stderr_tail[-_READ_BYTES:].decode("utf-8", "replace")
        for end in ends[:_READ_RANKS]
        if end.returncode != 0
    }
    places = _places_of_stacks(stacks, script_dir)
    awaited = _find(victims, ends, running, places, logs, script_dir)
    if awaited is None or awaited.state is AwaitedState.BEHIND:
        return awaited
    waiting = {rank: place.waits_in for rank, place in places.items()}
    wait = find_failed_wait(
        victims,
        {rank: log for rank, log in logs.items() if rank in failed},
        {rank: call for rank, call in waiting.items() if call is not None},
        awaited=awaited.ranks,
        script_dir=script_dir,
    )
    if awaited.state is AwaitedState.STUCK:
        stuck = awaited.wait or FailedWait(kind=WaitKind.COLLECTIVE)
        wait = replace(wait or stuck, mechanism=Mechanism.NCCL_HEARTBEAT, timeout_s=stuck.timeout_s)
    return replace(awaited, wait=wait)


def _find(
    victims: Sequence[FailureEvidence],
    ends: Sequence[WorkerExit],
    running: Sequence[int],
    places: Mapping[int, _Place],
    logs: Mapping[int, str],
    script_dir: str,
) -> Awaited | None:
    failed = {one.end.rank for one in victims}
    named = _named(_NAMING, logs.values()) - failed or _named(_NAMING_NOW, logs.values())
    failed -= named
    progress = _progress(ends)
    stall = next(filter(None, (_stall(rank, told) for rank, told in logs.items())), None)
    logs = {rank: told for rank, told in logs.items() if rank in failed}
    if named and failed:
        return replace(_absent(sorted(named), failed, places, progress), stall=stall)
    first_s = min(one.end.ended_s for one in victims)
    waited = tuple(sorted(failed))
    if early := [end.rank for end in ends if _ended_early(end, first_s)]:
        return Awaited(ranks=tuple(early), state=AwaitedState.ENDED, failed=waited)
    silent = sorted(({end.rank for end in ends if end.told_to_stop} | set(running)) - failed)
    if over := [rank for rank in silent if rank in places and places[rank].is_over]:
        return Awaited(ranks=tuple(over), state=AwaitedState.OVER, failed=waited)
    if stuck := _stuck(victims, logs, len(ends) + len(running)):
        return stuck
    if behind := _behind(logs, progress):
        return behind
    if all(one.standing is not Standing.TIMED_OUT for one in victims):
        return None
    return _elsewhere(silent, failed, places, progress) or _in_another_call(
        victims, places, script_dir
    )


def find_odd_collective(found: Sequence[FailureEvidence]) -> Awaited | None:
    """Return the ranks that called another collective than most, if torch's check of collectives
    says so in the failed ranks' evidence."""
    calls: dict[int, str] = {}
    for one in found:
        for match in _FINGERPRINT.finditer(f"{one.message or ''}\n{one.text}"):
            calls.setdefault(int(match[1]), f"{match[2]} {match[3] or ''}".rstrip())
    return _odd(calls, None)


def find_odd_parameters(
    evidence: FailureEvidence, ends: Sequence[WorkerExit], world_size: int
) -> Awaited | None:
    """Return the ranks whose model has other parameters than most, if a rank failed in DDP's check
    of them.

    The messages of all ranks in ``ends`` are compared.
    """
    if "DDP" not in evidence.text and "same param in process 0" not in evidence.text:
        return None
    counts: dict[int, str] = {}
    sizes: dict[int, tuple[str, str]] = {}
    for end in ends[:_READ_RANKS]:
        text = end.stderr_tail[-_READ_BYTES:].decode("utf-8", "replace")
        for match in _PARAMETER_COUNTS.finditer(text):
            counts.setdefault(int(match[1][:9]), match[2])
            counts.setdefault(int(match[3][:9]), match[4])
        for match in _PARAMETER_SIZES.finditer(text):
            sizes.setdefault(int(match[1][:9]), (match[2], match[3]))
    if (odd := _split(counts)) is not None:
        ranks, rare, others, common = odd
        them = "its" if len(ranks) == 1 else "their"
        return Awaited(
            ranks=tuple(ranks),
            state=AwaitedState.ODD,
            odd=f"gave DDP {rare} parameters, and {name_ranks(others)} {common}: {them} model "
            "differs",
        )
    # Rank 0 broadcasts its sizes: if all others complain alike, rank 0 differs.
    if (
        len(sizes) == min(world_size, _READ_RANKS) - 1 > 1
        and 0 not in sizes
        and len(set(sizes.values())) == 1
    ):
        number, shape = next(iter(sizes.values()))
        return Awaited(
            ranks=(0,),
            state=AwaitedState.ODD,
            odd=f"gave DDP a parameter {number} of another size than the {shape} of "
            f"{name_ranks(sorted(sizes))}: its model differs",
        )
    return None


def ranks_in_the_script(stacks: Sequence[m.Stack]) -> dict[int, bool]:
    """Return by rank whether the main thread still ran the script, as far as known.

    After the script, the interpreter may wait for threads or run functions of ``atexit``.
    """
    found = {}
    for stack in stacks:
        threads = parse_stacks(stack.text) if stack.text else []
        main = main_thread(threads) if threads else None
        if main is not None and main.frames and not main.cut:
            found[stack.rank] = main.frames[-1].function in _OUTERMOST
    return found


def ranks_with_the_exception(
    evidence: FailureEvidence, failed: Collection[int]
) -> tuple[int, ...] | None:
    """Return the ranks that raised an exception which all ranks report, as in a distributed
    checkpoint, if the text names them."""
    match = _RAISED_IN.search(f"{evidence.message or ''}\n{evidence.text}")
    if match is None:
        return None
    named = {int(number[:9]) for number in _ITEM.findall(match[1])}
    return tuple(rank for rank in sorted(named) if rank in failed) or None


def _named(patterns: Sequence[re.Pattern[str]], texts: Iterable[str]) -> set[int]:
    found: set[int] = set()
    for text in texts:
        for pattern in patterns:
            for listed in pattern.findall(text)[-1:]:
                found.update(int(number[:9]) for number in _ITEM.findall(listed))
    return found


def _ended_early(end: WorkerExit, first_s: float) -> bool:
    return end.returncode == 0 and not end.told_to_stop and end.ended_s <= first_s + _NOTICED_S


def _absent(
    ranks: Sequence[int],
    failed: set[int],
    places: Mapping[int, _Place],
    progress: Mapping[int, str],
) -> Awaited:
    place = places.get(ranks[0])
    call = place.call if place else None
    return Awaited(
        ranks=tuple(ranks),
        state=AwaitedState.AWAY,
        failed=tuple(sorted(failed)),
        inside=call,
        frame=place.frame if place else None,
        stack=place.stack if place else (),
        place_hint=hint_for_place(place.view) if place and place.view and not call else None,
        progress=_of_ranks(progress, ranks),
    )


def _stuck(
    victims: Sequence[FailureEvidence], logs: Mapping[int, str], world_size: int
) -> Awaited | None:
    """Return the ranks that their NCCL heartbeat monitor has ended; None if there are none, or if
    they are most ranks."""
    found = {rank: match for rank, log in logs.items() if (match := _STUCK.search(log)) is not None}
    if not found or 2 * len(found) > world_size:
        return None
    ranks = tuple(sorted(found))
    seconds = next((match[1] for match in found.values() if match[1]), None)
    one = next((one for one in victims if one.end.rank == ranks[0]), None)
    return Awaited(
        ranks=ranks,
        state=AwaitedState.STUCK,
        failed=tuple(sorted({one.end.rank for one in victims} - set(ranks))),
        wait=FailedWait(
            kind=WaitKind.COLLECTIVE, timeout_s=None if seconds is None else float(seconds[:9])
        ),
        frame=one.frame if one is not None else None,
    )


def _of_ranks(progress: Mapping[int, str], ranks: Sequence[int]) -> tuple[str, ...]:
    return tuple(progress[rank] for rank in ranks if rank in progress)[:_PROGRESS]


def _stall(rank: int, text: str) -> Stall | None:
    """Return Horovod's last warning in a rank's output that names the missing ranks, if there is
    one."""
    found: list[re.Match[str]] = [*_NAMING[1].finditer(text), *_NAMING[2].finditer(text)]
    if not found:
        return None
    begin, end = found[-1].span()
    if found[-1].re is _NAMING[1]:  # "Stalled ops:allreduce.loss [missing ranks: 2, 3]"
        begin = text.rfind("\n", 0, begin) + 1
    return Stall(rank=rank, text=" ".join(text[begin:end].split()))


def _progress(ends: Sequence[WorkerExit]) -> dict[int, str]:
    """Return by rank a line on its last NCCL work."""
    found: dict[int, str] = {}
    for end in ends[:_READ_RANKS]:
        text = end.stderr_tail[-_READ_BYTES:].decode("utf-8", "replace")
        kinds = {match[2]: match[3] for match in _WORK.finditer(text)}
        for match in _ENQUEUED.finditer(text):
            enqueued = match["enqueued"]
            name = f" ({kinds[enqueued]})" if enqueued in kinds else ""
            found[end.rank] = (
                f"{name_ranks((end.rank,))}: last enqueued NCCL work {enqueued}{name}, last "
                f"completed {match['completed']}"
            )
    return found


def _behind(logs: Mapping[int, str], progress: Mapping[int, str]) -> Awaited | None:
    """Return the ranks whose NCCL work has the lowest number in its group, or another type; None if
    all are equal or nothing is known."""
    groups: dict[str, dict[int, int]] = {}
    works: dict[int, re.Match[str]] = {}
    for rank, log in logs.items():
        enqueued = {match["group"] or "": match["enqueued"] for match in _ENQUEUED.finditer(log)}
        if (work := _WORK.search(log)) is not None:
            works[rank] = work
            enqueued = enqueued or {"": work[2]}
        for group, number in enqueued.items():
            groups.setdefault(group, {})[rank] = int(number[:18])
    for members in sorted(groups.values(), key=len, reverse=True):
        numbers = sorted(set(members.values()))
        if len(numbers) > 1:
            return _lowest(members, numbers, works, progress)
    calls = {rank: f"NCCL {work[3]} number {work[2]}" for rank, work in works.items()}
    return _odd(calls, None)


def _lowest(
    members: Mapping[int, int],
    numbers: Sequence[int],
    works: Mapping[int, re.Match[str]],
    progress: Mapping[int, str],
) -> Awaited:
    low = sorted(rank for rank, number in members.items() if number == numbers[0])
    rest = sorted(set(members) - set(low))
    work = next((works[rank] for rank in rest if rank in works), None)
    waits = work is not None and int(work[2][:18]) > numbers[0]
    number = int(work[2][:18]) if work is not None and waits else numbers[1]
    call = work[3] if work is not None and int(work[2][:18]) == number else None
    return Awaited(
        ranks=tuple(low),
        state=AwaitedState.BEHIND,
        failed=tuple(rest),
        wait=FailedWait(
            kind=WaitKind.COLLECTIVE,
            mechanism=Mechanism.NCCL_WATCHDOG,
            ranks=tuple(rest),
            call=call,
            timeout_s=int(work[4][:18]) / 1000 if work is not None and work[4] else None,
            sequence=number,
            last_sequence=numbers[0],
        ),
        progress=_of_ranks(progress, low),
    )


def _elsewhere(
    silent: Sequence[int],
    failed: set[int],
    places: Mapping[int, _Place],
    progress: Mapping[int, str],
) -> Awaited | None:
    """Return the ranks that had not failed and did not wait for others, by their stacks; None if
    there are none."""
    away = [rank for rank in silent if rank not in places or not places[rank].waits_surely]
    known = [rank for rank in away if rank in places and places[rank].view is not None]
    return _absent(known or away, failed, places, progress) if away else None


def _in_another_call(
    victims: Sequence[FailureEvidence], places: Mapping[int, _Place], script_dir: str
) -> Awaited | None:
    """Return the ranks that waited in another collective than most did; None if there are none."""
    calls: dict[int, str] = {}
    where: dict[int, _Place] = dict(places)
    for one in victims:
        frames = tuple(reversed(one.frames))
        where[one.end.rank] = _Place(ThreadStack(frames=frames) if frames else None, script_dir)
    for rank, place in where.items():
        if place.call is not None:
            calls[rank] = place.call
    found = _odd(calls, where)
    return found or _odd({rank: f"{calls[rank]} at {where[rank].frame}" for rank in calls}, where)


def _odd(calls: Mapping[int, str], places: Mapping[int, _Place] | None) -> Awaited | None:
    """Return the ranks with the rarest call, if it is the only rarest one."""
    odd = _split(calls)
    if odd is None:
        return None
    ranks, rare, others, common = odd
    place = places.get(ranks[0]) if places else None
    return Awaited(
        ranks=tuple(ranks),
        state=AwaitedState.ODD,
        odd=f"called {rare} while {name_ranks(others)} called {common}",
        frame=place.frame if place else None,
        stack=place.stack if place else (),
    )


def _split(values: Mapping[int, str]) -> tuple[list[int], str, list[int], str] | None:
    """Return (ranks, value) of the rarest value, followed by (ranks, value) of the most common one.

    Return None if all ranks have the same value, or if several values are equally rare.
    """
    counts = Counter(values.values())
    if len(counts) < 2:
        return None
    (common, _), *_, (rare, fewest) = counts.most_common()
    if list(counts.values()).count(fewest) > 1:
        return None
    ranks = sorted(rank for rank, value in values.items() if value == rare)
    return ranks, rare, sorted(rank for rank, value in values.items() if value == common), common


def _places_of_stacks(stacks: Sequence[m.Stack], script_dir: str) -> dict[int, _Place]:
    found = {}
    for stack in stacks:
        threads = parse_stacks(stack.text) if stack.text else []
        found[stack.rank] = _Place(
            main_thread(threads) if threads else None, script_dir, stack.source
        )
    return found
