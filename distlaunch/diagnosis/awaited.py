"""Find the ranks that other ranks (the victims) waited for until a timeout. No I/O.

The awaited rank has raised no exception. It is found in one of these ways:

* A message of a library names it.
* It has ended with 0.
* It is behind, by the sequence numbers of NCCL's watchdog.
* Its stack shows that it is not in the collective.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.text import name_ranks
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from distlaunch.diagnosis.consequence import Standing
from distlaunch.diagnosis.evidence import FailureEvidence
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
    r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+)"
)
_ENQUEUED = re.compile(
    # torch 2.4: "[PG 1 Rank 3] Timeout at NCCL work: 9141, last enqueued NCCL work: 9141, last
    # completed NCCL work: 9140."; 2.6: "... PG status: last enqueued work: 120051, last completed
    # work: 120048"
    r"Rank (\d+)\].{0,200}?last enqueued (?:NCCL )?work: (\d+), last completed (?:NCCL )?work: (\d+)"
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


class Awaited(Record):
    """The ranks that other ranks waited for."""

    ranks: tuple[int, ...]
    summary: str
    """A clause on what the ranks did: ``did not take part: ranks 0-1 timed out waiting``."""
    frame: str | None = None
    """The innermost frame of the user's code in the first of these ranks."""
    is_over: bool = False
    """Whether the ranks had come to the end of their script."""
    stack: tuple[str, ...] = ()
    """The stack of the first of these ranks, shortened, innermost frame first."""
    is_absent: bool = False
    """Whether the ranks did not come to the collective or the store."""
    is_behind: bool = False
    """Whether the ranks had issued fewer collectives than the others."""
    place_hint: str | None = None
    """The hint for the library call in which the first of these ranks is."""
    progress: tuple[str, ...] = ()
    """Lines on the last NCCL work of these ranks."""
    stall: Stall | None = None


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
    text = {
        end.rank: end.stderr_tail[-_READ_BYTES:].decode("utf-8", "replace")
        for end in ends[:_READ_RANKS]
        if end.returncode != 0
    }
    places = _places_of_stacks(stacks, script_dir)
    named = _named(_NAMING, text.values()) - failed or _named(_NAMING_NOW, text.values())
    failed -= named
    progress = _progress(ends)
    stall = next(filter(None, (_stall(rank, told) for rank, told in text.items())), None)
    text = {rank: told for rank, told in text.items() if rank in failed}
    if named and failed:
        return replace(_absent(sorted(named), failed, places, progress), stall=stall)
    first_s = min(one.end.ended_s for one in victims)
    if early := [end.rank for end in ends if _ended_early(end, first_s)]:
        return _ended(early, failed)
    silent = sorted(({end.rank for end in ends if end.told_to_stop} | set(running)) - failed)
    if over := [rank for rank in silent if rank in places and places[rank].is_over]:
        return _over(over, failed)
    if behind := _behind(text, progress):
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
            summary=f"gave DDP {rare} parameters, and {name_ranks(others)} {common}: {them} model "
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
            summary=f"gave DDP a parameter {number} of another size than the {shape} of "
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


def _ended(early: Sequence[int], failed: set[int]) -> Awaited:
    them = "it" if len(early) == 1 else "them"
    return Awaited(
        ranks=tuple(early),
        summary=f"ended with exit code 0 while {name_ranks(sorted(failed))} waited for {them}",
    )


def _over(ranks: Sequence[int], failed: set[int]) -> Awaited:
    them = "it" if len(ranks) == 1 else "them"
    script = "its script" if len(ranks) == 1 else "their scripts"
    return Awaited(
        ranks=tuple(ranks),
        is_over=True,
        summary=f"had come to the end of {script} while {name_ranks(sorted(failed))} waited for "
        f"{them}",
    )


def _absent(
    ranks: Sequence[int],
    failed: set[int],
    places: Mapping[int, _Place],
    progress: Mapping[int, str],
) -> Awaited:
    them = "it" if len(ranks) == 1 else "them"
    place = places.get(ranks[0])
    call = place.call if place else None
    inside = f", and waited in {call}" if call else ""
    return Awaited(
        ranks=tuple(ranks),
        summary=f"did not take part{inside}: {name_ranks(sorted(failed))} timed out waiting for "
        f"{them}",
        frame=place.frame if place else None,
        stack=place.stack if place else (),
        is_absent=True,
        place_hint=hint_for_place(place.view) if place and place.view and not call else None,
        progress=_of_ranks(progress, ranks),
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
    """Return by rank a line on its last NCCL work, as any rank has written it."""
    found: dict[int, str] = {}
    for end in ends[:_READ_RANKS]:
        text = end.stderr_tail[-_READ_BYTES:].decode("utf-8", "replace")
        kinds = {match[2]: match[3] for match in _WORK.finditer(text)}
        for match in _ENQUEUED.finditer(text):
            name = f" ({kinds[match[2]]})" if match[2] in kinds else ""
            found[int(match[1][:9])] = (
                f"{name_ranks((int(match[1][:9]),))}: last enqueued NCCL work {match[2]}{name}, last "
                f"completed {match[3]}"
            )
    return found


def _behind(texts: Mapping[int, str], progress: Mapping[int, str]) -> Awaited | None:
    """Return the ranks whose NCCL work has the lowest number, or another type; None if all are
    equal or nothing is known."""
    enqueued: dict[int, int] = {}
    calls: dict[int, str] = {}
    for rank, text in texts.items():
        for match in _ENQUEUED.finditer(text):
            enqueued[rank] = int(match[2][:18])
        if (work := _WORK.search(text)) is not None:
            calls[rank] = f"NCCL {work[3]} number {work[2]}"
            enqueued.setdefault(rank, int(work[2][:18]))
    numbers = sorted(set(enqueued.values()))
    if len(numbers) > 1:
        low = sorted(rank for rank, number in enqueued.items() if number == numbers[0])
        rest = sorted(set(enqueued) - set(low))
        verb = "is" if len(low) == 1 else "are"
        return Awaited(
            ranks=tuple(low),
            summary=f"{verb} behind: the last collective was number {numbers[0]}, and "
            f"{numbers[1]} or more on {name_ranks(rest)}",
            is_behind=True,
            progress=_of_ranks(progress, low),
        )
    return _odd(calls, None)


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
        summary=f"called {rare} while {name_ranks(others)} called {common}",
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
