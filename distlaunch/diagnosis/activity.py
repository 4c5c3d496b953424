"""Decide whether a silent worker has made progress between two samples of its stacks. No I/O.

A sample is a worker's stacks and processor time. Processor time alone proves nothing: a worker that
waits for a GPU, and so for a collective of NCCL, spins. A changed stack alone proves nothing
either: a loop that polls and sleeps is at different lines at different times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from distlaunch.core.model.record import Record
from distlaunch.core.protocol import agent_messages as m
from distlaunch.diagnosis.stack_parser import StackView, ThreadStack, main_thread, parse_stacks
from distlaunch.diagnosis.tracebacks import Frame
from distlaunch.diagnosis.waits import Waiting, call_that_waits, find_wait, waits_for_children

Why = Literal["moved", "computes", "children"]

BUSY = 0.2
"""A process that uses this share of a processor computes, even on an overloaded machine."""
HARDLY_BUSY = 0.02
"""The share that suffices for a worker that was runnable in both samples: the system may not have
given it more."""
_STANDS = ("T", "t", "D", "Z", "X", "")
"""Process states in which a worker does not run."""


class Activity(Record):
    """The evidence of progress."""

    rank: int
    why: Why
    """``moved``: the rank was in another function. ``computes``: the rank used a processor.
    ``children``: its child processes used one."""
    frame: str | None
    """The innermost frame of the user's code in the second sample."""

    @property
    def words(self) -> str:
        """A text that names the working rank and its frame."""
        who = (
            f"processes of rank {self.rank} work"
            if self.why == "children"
            else f"rank {self.rank} works"
        )
        return f"{who}, at {self.frame}" if self.frame else who

    def as_fields(self) -> dict[str, object]:
        """Return the fields about the activity for ``events.jsonl``."""
        return {"rank": self.rank, "why": self.why, "frame": self.frame}


class _Sample:
    def __init__(self, stack: m.Stack, script_dir: str) -> None:
        self.stack = stack
        threads = parse_stacks(stack.text) if stack.text else []
        main = main_thread(threads)
        self.view = StackView(main, script_dir, stack.source) if main else None
        wait = find_wait(self.view) if self.view else None
        self.collective = wait.name if wait is not None and wait.waiting is Waiting.SURELY else None
        self.synchronises = wait is not None and wait.synchronises
        self.waits_for_others = wait is not None
        self.main = None if main is None or self.view is None else _path(main, self.view)
        self.threads = {}
        for thread in threads:
            if (
                thread is not main
                and thread.ident is not None
                and (view := StackView(thread, script_dir)).frames
            ):
                self.threads[thread.ident] = _path(thread, view)


class _Path:
    """The calls of a thread, outermost first, down to the call that waits."""

    def __init__(self, frames: Sequence[Frame], *, cut: bool) -> None:
        self.functions = tuple((frame.file, frame.function) for frame in frames)
        self.lines = tuple(frame.line for frame in frames)
        self.cut = cut


def find_activity(
    before: Sequence[m.Stack], after: Sequence[m.Stack], script_dir: str
) -> Activity | None:
    """Return the activity of the lowest rank that has made progress between the samples, if any
    has.

    Progress is a change of calls other than waiting ones, or the use of a processor outside a
    collective and a wait for a GPU. ``script_dir``: files below it are the user's own.
    """
    earlier = {stack.rank: stack for stack in before}
    for stack in sorted(after, key=lambda each: each.rank):
        first = earlier.get(stack.rank)
        if (
            first is None
            or first.pid != stack.pid
            or first.state in _STANDS
            or stack.state in _STANDS
        ):
            continue
        if not first.text or not stack.text:
            continue  # without its stack, the place where a worker computes is not known
        samples = _Sample(first, script_dir), _Sample(stack, script_dir)
        why = _why(*samples)
        if why is not None:
            place = samples[1].view.place if samples[1].view else None
            return Activity(rank=stack.rank, why=why, frame=str(place) if place else None)
    return None


def uses_processor(before: Sequence[m.Stack], after: Sequence[m.Stack]) -> bool:
    """Return whether a worker without a GPU has used a processor, however little. A collective that
    makes progress does so, in threads without a Python stack."""
    earlier = {stack.rank: stack for stack in before}
    for stack in after:
        first = earlier.get(stack.rank)
        if first is None or stack.holds_gpu or first.pid != stack.pid:
            continue
        if stack.cpu_s - first.cpu_s > HARDLY_BUSY * (stack.taken_s - first.taken_s):
            return True
    return False


def _why(first: _Sample, second: _Sample) -> Why | None:
    """Return the evidence that a worker has made progress between two samples; None if there is
    none."""
    if first.main is None or second.main is None or second.view is None:
        return None
    busy = _is_busy(first.stack, second.stack)
    if _has_moved(first.main, second.main, busy=busy):
        return "moved"
    if first.collective and (first.collective, first.main.lines) != (
        second.collective,
        second.main.lines,
    ):
        return "moved"  # the first collective has ended
    if second.collective or second.synchronises:
        return None
    if busy and not second.stack.holds_gpu:
        return "computes"
    if second.waits_for_others:
        return None
    children_s = second.stack.children_cpu_s - first.stack.children_cpu_s
    if (
        waits_for_children(second.view)
        and children_s >= BUSY * (second.stack.taken_s - first.stack.taken_s) > 0
    ):
        return "children"
    # The main thread waits for another thread of its own, which may be the one that trains.
    for ident, path in second.threads.items():
        if ident in first.threads and _has_moved(first.threads[ident], path, busy=busy):
            return "moved"
    return None


def _is_busy(first: m.Stack, second: m.Stack) -> bool:
    """Return whether a worker computed between two samples: it used a share of ``BUSY`` of a
    processor, or of ``HARDLY_BUSY`` and was runnable in both."""
    elapsed_s = second.taken_s - first.taken_s
    if elapsed_s <= 0:
        return False
    share = (second.cpu_s - first.cpu_s) / elapsed_s
    return share >= BUSY or (share >= HARDLY_BUSY and first.state == second.state == "R")


def _has_moved(first: _Path, second: _Path, *, busy: bool) -> bool:
    """Return whether a thread is in another call than in the first sample.

    Another line of the same function, or a further call within it, may belong to a loop that polls.
    Both count only for a busy worker.
    """
    if first.functions == second.functions:
        return busy and first.lines != second.lines
    if first.cut or second.cut:  # their outermost frames are missing
        return True
    shorter = min(len(first.functions), len(second.functions))
    return busy or first.functions[:shorter] != second.functions[:shorter]


def _path(thread: ThreadStack, view: StackView) -> _Path:
    """Return the calls of a thread, without the call that waits and the calls inside it."""
    call = call_that_waits(view)
    frames = list(thread.frames)
    if call is not None:
        inside = max(number for number, frame in enumerate(frames) if frame == call)
        del frames[: inside + 1]
    return _Path(frames[::-1], cut=thread.cut)
