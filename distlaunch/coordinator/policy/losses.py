"""Find lost nodes that caused the failure of an attempt, and write the texts about them. No I/O."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence

from distlaunch.coordinator.policy.events_and_actions import LossKind
from distlaunch.coordinator.policy.failures import looks_like_consequence
from distlaunch.coordinator.policy.job_progress import STEP
from distlaunch.core.errors import EXIT_UNAVAILABLE
from distlaunch.core.model.host_list import name_hosts
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.text import counted, name_ranks
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.diagnosis.model import Cause, Diagnosis

_SHOWN = 4
"""Largest number of lost nodes that are named individually."""
_RANKS_SHOWN = 60
_SHUT_DOWN = (-signal.SIGTERM, -signal.SIGKILL, -signal.SIGHUP)
_SHUT_DOWN_S = 10.0
"""A system that shuts down ends all processes with these signals, and its connections within this
time."""


class Loss(Record):
    """A node that was lost while its workers ran or were about to start."""

    node: int
    host: str
    why: str
    """The reason as a clause."""
    ranks: tuple[int, ...]
    ended_s: float
    """When the loss was noticed, in seconds since the attempt began."""
    exit_code: int = EXIT_UNAVAILABLE
    kind: LossKind = LossKind.GONE


def explains(diagnosis: Diagnosis, failures: Iterable[WorkerExit], losses: Sequence[Loss]) -> bool:
    """Return whether a worker's own failure explains the end of the attempt: it came before the
    losses and was no result of them."""
    first = diagnosis.cause.ranks[0] if diagnosis.cause_seen and diagnosis.cause.ranks else None
    end = next((end for end in failures if end.rank == first), None)
    if (
        end is None
        or end.told_to_stop
        or end.ended_s > losses[0].ended_s
        or looks_like_consequence(end)
    ):
        return False
    itself = next((loss for loss in losses if end.rank in loss.ranks), None)
    shut_down = (
        itself is not None
        and end.returncode in _SHUT_DOWN
        and itself.ended_s - end.ended_s <= _SHUT_DOWN_S
    )
    return not shut_down


def with_losses(diagnosis: Diagnosis, losses: Sequence[Loss]) -> Diagnosis:
    """Return the diagnosis with a line about the lost nodes."""
    ranks = [rank for loss in losses for rank in loss.ranks]
    line = f"{_name_ranks(ranks)}: lost with {_name_nodes(losses)} ({losses[0].why})"
    return replace(diagnosis, others=(*diagnosis.others, line))


def diagnosis_of(
    losses: Sequence[Loss],
    others: Sequence[str],
    *,
    latest: Mapping[int, Mapping[str, float]],
    may_have_bounds: bool = True,
) -> Diagnosis:
    """Return the diagnosis of an attempt that lost nodes have ended.

    ``latest``: the newest heartbeats, by rank. ``may_have_bounds``: as in ``NodeSetupSettings``.
    """
    first = losses[0]
    ranks = tuple(rank for loss in losses for rank in loss.ranks)
    summary = f"the node is lost: {first.why}"
    if len(losses) > 1:
        alike = all(loss.why == first.why for loss in losses)
        summary = (
            f"{counted(len(losses), 'node')} are lost: "
            f"{'' if alike else f'{first.host} first, '}{first.why}"
        )
    steps = {rank: latest[rank][STEP] for rank in ranks if rank in latest and STEP in latest[rank]}
    message = None
    if steps:
        last = min(steps, key=lambda rank: (-steps[rank], rank))
        message = f"the last step reported from there: {steps[last]:g} (rank {last})"
    cause = Cause(
        ranks=ranks,
        host=name_hosts(loss.host for loss in losses),
        returncode=first.exit_code,
        summary=summary,
        at_once=True,
        message=message,
    )
    kinds = {loss.kind for loss in losses}
    hint = hint_of_transport(first.kind)
    if hint is None and len(kinds) == 1:
        hint = _hint_of_kind(first.kind)
    if hint is None:
        hint = _crash_hint(may_have_bounds=may_have_bounds)
    return Diagnosis(cause=cause, exit_code=first.exit_code, others=tuple(others), hint=hint)


def hint_of_transport(kind: LossKind) -> str | None:
    """Return the hint for a kind of loss that only one transport reports, if any."""
    match kind:
        case LossKind.RAY_DRIVER:
            return "start the job again: without its driver a launcher has nothing of Ray's cluster"
        case LossKind.RAY_ACTOR:  # the number of nodes is fixed in jobs on Ray
            return (
                f"ray list nodes, or actors, tells of it; with {Opt.MAX_RESTARTS('N')} Ray gives "
                "another in its place"
            )
        case _:
            return None


def _hint_of_kind(kind: LossKind) -> str | None:
    match kind:
        case LossKind.UNHEARD:
            advice = f", or {Opt.LOST_AFTER}, and no longer" if Opt.LOST_AFTER.exists else ""
            return "this launcher, its machine or the network stood still: nodes wait 10 s" + advice
        case LossKind.SILENT:
            advice = f"; {Opt.LOST_AFTER('S')} waits longer" if Opt.LOST_AFTER.exists else ""
            return (
                "the node, its launcher or the network stood still for so long, or the machine has "
                "crashed (dmesg, journalctl -k)" + advice
            )
        case LossKind.ODD:
            return (
                "that node runs something else than this release of distlaunch, or what it sends "
                "is changed on the way"
            )
        case _:
            return None


def _crash_hint(*, may_have_bounds: bool) -> str:
    restarts = (
        f"{Opt.NUM_NODES('MIN:MAX')} goes on without a lost node, {Opt.MAX_RESTARTS} waits for it"
        if may_have_bounds
        else f"{Opt.MAX_RESTARTS('N')} starts the job again"
    )
    more_time = (
        f", {Opt.LOST_AFTER('S')} gives a network more time than 10 s"
        if Opt.LOST_AFTER.exists
        else ""
    )
    return f"its system's log (dmesg, journalctl -k) may tell of a crash; {restarts}{more_time}"


def who_left(losses: Sequence[Loss]) -> str:
    """Return the lost nodes with the reasons: ``node n3 (ranks 4-5) left: no word for 10 s``."""
    if len(losses) > _SHOWN:
        return f"{_name_nodes(losses)} left: {losses[0].why}"
    reasons: dict[str, list[str]] = {}
    for loss in losses:
        reasons.setdefault(loss.why, []).append(f"{loss.host} ({_name_ranks(loss.ranks)})")
    return "; ".join(
        f"{'node' if len(nodes) == 1 else 'nodes'} {', '.join(nodes)} left: {why}"
        for why, nodes in reasons.items()
    )


def _name_nodes(losses: Sequence[Loss]) -> str:
    if len(losses) == 1:
        return f"node {losses[0].host}"
    return f"{counted(len(losses), 'node')} ({name_hosts(loss.host for loss in losses)})"


def _name_ranks(ranks: Sequence[int]) -> str:
    named = name_ranks(ranks)
    return named if len(named) <= _RANKS_SHOWN else counted(len(set(ranks)), "rank")
