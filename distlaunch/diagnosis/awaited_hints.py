"""Choose the hint for failures of ranks that waited for others. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import name_ranks
from distlaunch.diagnosis.awaited import Awaited, AwaitedState
from distlaunch.diagnosis.consequence import Standing
from distlaunch.diagnosis.failed_waits import key_of
from distlaunch.diagnosis.failure_kinds import FailureKind, Hint
from distlaunch.diagnosis.model import WaitKind

K = FailureKind


class AwaitedFailure(Record):
    """The awaited ranks, and what the waiting ranks have written about the timeout."""

    awaited: Awaited
    text: str

    @property
    def lower(self) -> str:
        """The text in lower case."""
        return self.text.lower()

    @property
    def key(self) -> str | None:
        """The key of the script's own for which ranks have waited at a store."""
        return key_of(self.text)

    def has(self, *marks: str) -> bool:
        """Return whether the text contains one of these."""
        return any(mark in self.lower for mark in marks)

    def waits_for(self, kind: WaitKind) -> bool:
        """Return whether the others waited for this."""
        return self.awaited.wait is not None and self.awaited.wait.kind is kind


class AwaitedRow(Record):
    """One row of the table. ``{rank}`` in the hint is the first awaited rank, ``{there}`` says where
    it was, ``{key}`` is the key of the store."""

    kind: FailureKind
    hint: str
    when: Callable[[AwaitedFailure], bool] = lambda _: True
    states: tuple[AwaitedState, ...] = (AwaitedState.AWAY,)


AWAITED: tuple[AwaitedRow, ...] = (
    AwaitedRow(
        kind=K.ORDER,
        hint=(
            "ranks issue different collectives, or one is behind: look for a collective under a "
            "condition on the rank, and for unequal numbers of batches"
        ),
        states=(AwaitedState.BEHIND,),
    ),
    AwaitedRow(
        kind=K.ORDER,
        hint=(
            "all ranks must call the same collectives of Horovod, with the same names, in the same "
            "order: see what {rank} did {there}"
        ),
        when=lambda failure: failure.has(
            "missing ranks", "stalled ops", "waiting for remainder of ranks"
        ),
    ),
    AwaitedRow(
        kind=K.KEY,
        hint=(
            "the others wait for the key {key} of the store, which {rank} has not set: see what "
            "it did {there}; set the key earlier, or wait longer for it"
        ),
        when=lambda failure: failure.key is not None,
    ),
    AwaitedRow(
        kind=K.RENDEZVOUS,
        hint=(
            "see what {rank} did {there}, before init_process_group: prepare data before the job or "
            "after all ranks have joined, or raise timeout= of init_process_group"
        ),
        when=lambda failure: failure.waits_for(WaitKind.RENDEZVOUS),
    ),
    AwaitedRow(
        kind=K.AWAITED,
        hint=(
            "{rank} was blocked or at work {there}, and the others waited in NCCL: do long work on "
            "all ranks or before init_process_group, or raise its timeout="
        ),
        when=lambda failure: failure.has("heartbeat", "watchdog"),
    ),
    AwaitedRow(
        kind=K.AWAITED,
        hint=(
            "see what {rank} did {there}: do long work before the group is made or on all ranks, or "
            "raise the timeout"
        ),
        when=lambda failure: failure.has(
            "horovod", "coordination service", "collective ops", "jax", "mpi4py"
        ),
    ),
    AwaitedRow(
        kind=K.AWAITED,
        hint=(
            "see what {rank} did {there}: do long work before init_process_group or on all ranks, "
            "or raise the timeout (timeout= of init_process_group or monitored_barrier)"
        ),
    ),
)
"""The first row that matches gives the hint."""


def hint_for_awaited(awaited: Awaited, text: str) -> Hint | None:
    """Return what the user can do about the awaited ranks.

    ``text`` is what the waiting ranks have written about the timeout. Return None if the awaited
    ranks neither stayed away nor were behind.
    """
    rank = name_ranks(awaited.ranks[:1])
    if awaited.place_hint is not None:
        return Hint(kind=awaited.place_hint.kind, text=f"{rank}: {awaited.place_hint.text}")
    failure = AwaitedFailure(awaited=awaited, text=text)
    for row in AWAITED:
        if awaited.state in row.states and row.when(failure):
            there = "at that line" if awaited.frame else "meanwhile"
            return Hint(
                kind=row.kind, text=row.hint.format(rank=rank, there=there, key=failure.key)
            )
    return None


def hint_at_end_of_script() -> Hint:
    """Return the hint for ranks that had come to the end of their script."""
    return Hint(kind=K.EARLY, text="do all ranks run the same number of steps?")


def hint_at_early_ends(early: Sequence[int]) -> Hint:
    """Return the hint for ranks that ended with 0 before the others failed."""
    return Hint(
        kind=K.EARLY,
        text=f"{name_ranks(early)} had already ended with exit code 0: do all ranks run the same "
        "number of steps?",
    )


def hint_at_running_ranks(late: Sequence[int]) -> Hint:
    """Return the hint for ranks that still ran when the others had failed."""
    was, it, hangs = ("was", "it", "hangs") if len(late) == 1 else ("were", "they", "hang")
    return Hint(
        kind=K.AWAITED,
        text=f"{name_ranks(late)} {was} still running and had not failed: with a "
        f"{Opt.HANG_TIMEOUT} below the timeout of the collective, the report shows where {it} {hangs}",
    )


def hint_at_missing_ranks(missing: Sequence[int]) -> Hint:
    """Return the hint for ranks of which no exit is known."""
    return Hint(
        kind=K.AWAITED,
        text=f"{name_ranks(missing)} did not fail: did it end early, or does it hang?",
    )


def hint_at_different_collectives(text: str) -> Hint:
    """Return the hint, with this text, for ranks of which none is known to be awaited."""
    return Hint(kind=K.ORDER, text=text)


def hint_at_connections(standing: Standing) -> Hint:
    """Return the hint if all ranks failed because of each other."""
    if standing is Standing.TIMED_OUT:
        return hint_at_different_collectives(
            "ranks waited for each other: do all of them call the same collectives in the same "
            "order?"
        )
    return Hint(
        kind=K.NETWORK,
        text="a connection broke while all ranks ran: look at the nodes' network",
    )
