"""Find the first cause among all failed exits, and describe the other workers. No I/O.

A cause comes before a consequence (a lost rank, a collective that timed out), even if the worker
with the consequence exited first.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice

from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.text import name_ranks
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from distlaunch.diagnosis.awaited import (
    Awaited,
    AwaitedState,
    find_awaited,
    find_odd_collective,
    find_odd_parameters,
    ranks_in_the_script,
    ranks_with_the_exception,
)
from distlaunch.diagnosis.awaited_hints import (
    hint_at_connections,
    hint_at_different_collectives,
    hint_at_early_ends,
    hint_at_end_of_script,
    hint_at_missing_ranks,
    hint_at_running_ranks,
    hint_for_awaited,
)
from distlaunch.diagnosis.clean_text import shorten_middle, to_lines
from distlaunch.diagnosis.consequence import Standing
from distlaunch.diagnosis.evidence import FailureEvidence, printed_s, read, was_stopped
from distlaunch.diagnosis.exception_text import text_of
from distlaunch.diagnosis.failure_kinds import FailureKind, Hint
from distlaunch.diagnosis.hints import hint_for
from distlaunch.diagnosis.last_lines import is_logged_error, last_lines, line_about_waiting
from distlaunch.diagnosis.model import Cause, Diagnosis
from distlaunch.diagnosis.native import DUMP_BEGINS, find_crash, signal_name
from distlaunch.diagnosis.special_hints import missing_module
from distlaunch.diagnosis.tracebacks import read_tracebacks
from distlaunch.diagnosis.unwrap import unwrap
from distlaunch.diagnosis.waits import DIFFERENT

_OWN_FAILURE_S = 2.0
"""A failure within this time of the first one may be the worker's own, even after a request to
stop."""
_TOGETHER_S = 1.0
"""Two failures within this time may have different causes."""
_ENDING_S = 15.0
"""A worker that printed a traceback up to this long before the first exit may still be ending with
it. There is no limit if its stack shows that the script has ended."""
_BEFORE_THE_STOP_S = 0.1
"""Other workers run on for at least this long after a failure with output on stderr."""
_WHILE_ENDING = "stopped by us while it was ending with its own exception"
_PRINTED = "had just printed an exception of its own"
_READ_WHOLE = 256
"""Number of exits to examine. If none of them is a cause, more are examined, at most
``_READ_AT_MOST``."""
_READ_AT_MOST = 8192
_SYMPTOM = re.compile(
    r"Connection (?:closed|reset|aborted|refused)(?: by (?:remote )?peer)?|Broken pipe|remote "
    r"process exited"
    r"|Horovod has been shut down",
    re.IGNORECASE,
)
"""The words of a lost rank's message that are equal on all ranks, without addresses, durations and
counters."""
_SURVIVED = 5
"""An error counts that at most this many lines follow."""
_TAIL_BYTES = 16384
"""Number of bytes at the end of the output in which lines about a wait are searched."""
_MORE_CHARS = 240
_DEAD = 4
"""Largest number of lines about threads and processes that an exception has ended."""
_OTHERS = 8
"""Largest number of lines about other ranks."""


def looks_like_consequence(end: WorkerExit) -> bool:
    """Return whether this exit is probably a consequence of another rank's failure, for which the
    launcher then waits a moment."""
    return read(end).standing is not Standing.CAUSE


def diagnose(
    ends: Sequence[WorkerExit],
    *,
    world_size: int,
    running: Sequence[int] = (),
    python: str | None = None,
    after_grace: str | None = None,
    adds_local_rank: bool = False,
    dashes_first: bool = False,
    master_port: int | None = None,
    stacks: Sequence[m.Stack] = (),
    script_dir: str = "",
) -> Diagnosis:
    """Return the first cause among the exits of one attempt, with the other workers and a hint.

    The exit code of the diagnosis is that of the failed worker, 128+N if signal N ended the worker,
    or 1 if no exit is a failure.

    * ``running``: ranks that have not exited.
    * ``python``: the workers' interpreter, for hints.
    * ``after_grace``: for workers that were killed because they did not exit on request, the words
      that say after which time limit.
    * ``adds_local_rank``: the launcher has given the script ``--local_rank=N``.
    * ``dashes_first``: the script's first argument is ``--``.
    * ``master_port``: the port of the attempt.
    * ``stacks``: those of the workers that were running when the first worker failed.
    * ``script_dir``: files below it are the user's own.
    """
    bad = sorted((end for end in ends if end.returncode != 0), key=lambda end: end.ended_s)
    if not bad:
        return Diagnosis(
            cause=Cause(ranks=(), host="", returncode=1, summary="no worker reported a failure"),
            exit_code=1,
        )
    own = [end for end in bad if not was_stopped(end)]
    first_s = (own or bad)[0].ended_s
    eligible = (
        [end for end in own if not end.told_to_stop or printed_s(end) <= first_s + _OWN_FAILURE_S]
        or own
        or bad
    )
    seen: dict[int, FailureEvidence] = {}
    for end in eligible[:_READ_AT_MOST]:
        if len(seen) >= _READ_WHOLE and any(
            one.standing is Standing.CAUSE for one in seen.values()
        ):
            break
        seen[end.rank] = read(end)
    in_script = ranks_in_the_script(stacks)
    broken = {one.end.rank: one for one in _broken_before(first_s, ends, in_script)}
    best = min((*seen.values(), *broken.values()), key=lambda one: (one.standing, one.failed_s))
    if best.standing >= Standing.TIMED_OUT:
        best = _cause_of_a_stopped_one(first_s, ends, seen, in_script) or best
    code = 1 if best.summary == _WHILE_ENDING else best.end.returncode
    broken |= _broken_with(best, first_s, ends, in_script)
    same = (*_same(best, seen, eligible), *_stopped_alike(best, bad))
    same = ranks_with_the_exception(best, {end.rank for end in bad}) or same
    cause_seen = best.standing < Standing.TIMED_OUT
    cause = _cause(best, same, _hosts_of(best, same, bad), cause_seen=cause_seen)
    named = set(cause.ranks)
    lost = _lost_before_the_stop([end for end in ends if end.rank not in named])
    awaited = (
        find_odd_collective(list(seen.values())) or find_odd_parameters(best, ends, world_size)
        if cause_seen
        else find_awaited(
            [one for one in (*seen.values(), *lost.values()) if _waited(one)],
            ends,
            running,
            stacks,
            script_dir,
        )
    )
    stuck = awaited is not None and awaited.state is AwaitedState.STUCK
    if awaited is not None:
        if stuck:  # its own message says more than those of the others
            best = seen.get(awaited.ranks[0], best)
        cause = _of_awaited(awaited, best, ends)
        if not cause_seen:
            first = (best.end.rank, *(end.rank for end in bad if end.rank != best.end.rank))
            written = what_ranks_wrote(ends, first, awaited.ranks)
            told = cause.message or cause.summary
            written = tuple(line for line in written if told not in line)
            cause = replace(cause, written=(*awaited.progress, *written))
        named = set(cause.ranks)
    others = [end for end in ends if end.rank not in named]
    too = {
        rank
        for rank, one in (seen | broken).items()
        if rank not in named
        and one.standing is best.standing is Standing.CAUSE
        and abs(one.failed_s - best.failed_s) <= _TOGETHER_S
    }
    known = hint_for(
        best,
        python=python,
        world_size=world_size,
        adds_local_rank=adds_local_rank,
        dashes_first=dashes_first,
        master_port=master_port,
        nodes=len({end.host for end in ends}),
    )
    hint = known
    if cause_seen or (stuck and known is not None):
        pass
    elif awaited is not None and awaited.state is AwaitedState.OVER:
        hint = hint_at_end_of_script()
    elif not (known and known.tells_why_ranks_did_not_meet):
        hint = _hint_to_meet(awaited, best, hint) or (
            _hint_at_others(ends, running, world_size, lost)
            or hint
            or hint_at_connections(best.standing)
        )
    if hint is None and after_grace is not None and any(map(was_killed_by_us, others)):
        hint = Hint(
            kind=FailureKind.SIGNAL,
            text=f"if one that was killed was saving its state, a longer {Opt.FAILURE_GRACE} lets "
            "it end",
        )
    return Diagnosis(
        cause=cause,
        exit_code=code if code > 0 else 128 - code,
        failed_too=_others(
            [end for end in others if end.rank in too],
            seen,
            (),
            broken,
            world_size=world_size,
            after_grace=after_grace,
        ),
        others=_others(
            [end for end in others if end.rank not in too],
            seen,
            running,
            lost,
            world_size=world_size,
            after_grace=after_grace,
        ),
        hint=None if hint is None else hint.text,
        hint_kind=None if hint is None else hint.kind.value,
        repeats=best.repeats if cause_seen else None,
        signature=_signature(best) if cause_seen else None,
        cause_seen=cause_seen,
        missing_module=missing_module(best) if cause_seen else None,
    )


def diagnose_stop(
    ends: Sequence[WorkerExit], *, world_size: int, python: str | None = None
) -> Diagnosis | None:
    """Return how workers failed after the job was asked to stop.

    Return None if they exited only because of the stop or of other workers. The exit code of the
    diagnosis is the failed worker's, not the job's.
    """
    ends = [replace(end, told_to_stop=True) for end in ends]
    failed = [end for end in ends if end.returncode != 0 and not was_stopped(end)]
    if not any(read(end).standing is Standing.CAUSE for end in failed[:_READ_WHOLE]):
        return None
    return diagnose(ends, world_size=world_size, python=python)


def doing(
    ends: Sequence[WorkerExit], *, world_size: int, after_grace: str | None
) -> tuple[str, ...]:
    """Return lines on the state of the workers when something else (such as a lost node) ended the
    attempt."""
    bad = sorted(
        (end for end in ends if end.returncode != 0 and not was_stopped(end)),
        key=lambda end: end.ended_s,
    )
    seen = {end.rank: read(end) for end in bad[:_READ_WHOLE]}
    return _others(
        ends, seen, (), _lost_before_the_stop(ends), world_size=world_size, after_grace=after_grace
    )


def exceptions_of_threads(ends: Sequence[WorkerExit]) -> tuple[str, ...]:
    """Return at most four lines: one for each kind of exception that ended a thread or a child
    process, and for each kind of crash of a child process.

    The worker's main thread may wait for it forever.
    """
    kinds: dict[str, list[int]] = {}
    told = (
        end
        for end in ends
        if b"Traceback " in end.stderr_tail or DUMP_BEGINS.encode() in end.stderr_tail
    )
    for end in islice(told, _READ_WHOLE):
        lines, found, _ = read_tracebacks(unwrap(to_lines(end.stderr_tail)))
        if (crash := find_crash(lines)) is not None and was_stopped(end):
            kinds.setdefault(f"a child process had crashed: {crash.text}", []).append(end.rank)
        dead = [one for one in found if one.chain and one.kind in ("thread", "process")]
        if dead:
            raised = dead[-1].chain[-1]
            where = f", at {raised.frame}" if raised.frame is not None else ""
            what = "a thread" if dead[-1].kind == "thread" else "a child process"
            text = shorten_middle(text_of(raised), _MORE_CHARS)
            kinds.setdefault(f"{what} had ended with {text}{where}", []).append(end.rank)
    return tuple(f"{name_ranks(ranks)}: {text}" for text, ranks in islice(kinds.items(), _DEAD))


def what_ranks_wrote(
    ends: Sequence[WorkerExit], waiting: Sequence[int], awaited: Sequence[int]
) -> tuple[str, ...]:
    """Return the last lines about a wait, of the first of ``waiting`` that wrote one and of the
    first of ``awaited``."""
    of = {end.rank: end for end in ends}
    found: list[str] = []
    for ranks, problems in (
        ([rank for rank in waiting if rank not in set(awaited)], False),
        (awaited[:1], True),
    ):
        for rank in ranks[:_READ_WHOLE]:
            end = of.get(rank)
            line = None if end is None else _line_about_waiting(end, problems=problems)
            if line is not None and not any(line in other for other in found):
                found.append(
                    f"{name_ranks((rank,))} had written: {shorten_middle(line, _MORE_CHARS)}"
                )
                break
    return tuple(found)


def _line_about_waiting(end: WorkerExit, *, problems: bool) -> str | None:
    """Return what a worker wrote about its wait, if it did. ``problems``: or about an error that it
    has survived."""
    lines, tracebacks, _ = read_tracebacks(unwrap(to_lines(end.stderr_tail[-_TAIL_BYTES:])))
    if problems:
        last = tracebacks[-1] if tracebacks and tracebacks[-1].chain else None
        if last is not None and len(last_lines(lines[last.end :], _SURVIVED + 1)) <= _SURVIVED:
            raised = last.chain[-1]
            text = text_of(raised)
            return f"{text} ({raised.frame})" if raised.frame is not None else text
        logged = (line for line in last_lines(lines, _SURVIVED) if is_logged_error(line))
        if (line := next(logged, None)) is not None:
            return line.strip()
    start = next((one.start for one in tracebacks if one.kind == "main"), len(lines))
    stdout = to_lines(end.stdout_tail[-_TAIL_BYTES:].encode("utf-8", "replace"))
    return line_about_waiting(lines[:start], stdout)


def _broken_before(
    first_s: float, ends: Sequence[WorkerExit], in_script: Mapping[int, bool]
) -> Iterator[FailureEvidence]:
    """Yield the evidence of workers that had printed an uncaught exception before the first exit,
    and were stopped while their interpreters ended.

    ``in_script``: whether the script of a rank still ran, as far as known.
    """
    told = (end for end in ends if end.told_to_stop and end.traceback_age_s is not None)
    for end in islice(told, _READ_WHOLE):
        since_s = first_s - printed_s(end)
        if since_s <= 0 or in_script.get(end.rank, False):
            continue
        evidence = _as_if_it_had_ended(end)
        over = in_script.get(end.rank) is False and evidence.left_the_script
        ends_now = over or (evidence.is_uncaught and since_s <= _ENDING_S)
        if ends_now and evidence.standing is Standing.CAUSE:
            yield replace(evidence, failed_s=printed_s(end))


def _broken_with(
    best: FailureEvidence,
    first_s: float,
    ends: Sequence[WorkerExit],
    in_script: Mapping[int, bool],
) -> dict[int, FailureEvidence]:
    """Return the evidence, by rank, of stopped workers with a failure of their own.

    Such a worker had printed an exception almost when ``best`` failed, before it was stopped, and
    the exception differs from the one of ``best``.
    """
    found: dict[int, FailureEvidence] = {}
    if best.standing is not Standing.CAUSE:
        return found
    told = (end for end in ends if end.told_to_stop and end.traceback_age_s is not None)
    for end in islice(told, _READ_WHOLE):
        if not was_stopped(end) or end.rank == best.end.rank or in_script.get(end.rank, False):
            continue
        if abs(printed_s(end) - best.failed_s) > _TOGETHER_S:
            continue
        if printed_s(end) <= first_s + _BEFORE_THE_STOP_S:
            evidence = _as_if_it_had_ended(end)
            if evidence.kind[2:] == best.kind[2:] or evidence.standing is not Standing.CAUSE:
                continue
            if evidence.is_uncaught:
                found[end.rank] = replace(evidence, failed_s=printed_s(end))
            elif evidence.is_last and printed_s(end) <= best.failed_s:
                # It may be ending: a function has caught the exception, and called sys.exit.
                found[end.rank] = replace(evidence, summary=_PRINTED, failed_s=printed_s(end))
    return found


def _as_if_it_had_ended(end: WorkerExit) -> FailureEvidence:
    """Return the evidence of a stopped worker as if its exception had ended it."""
    if end.returncode > 0 and not was_stopped(end):
        return read(end)
    return replace(read(replace(end, returncode=1)), summary=_WHILE_ENDING, end=end)


def _cause_of_a_stopped_one(
    first_s: float,
    ends: Sequence[WorkerExit],
    seen: dict[int, FailureEvidence],
    in_script: Mapping[int, bool],
) -> FailureEvidence | None:
    """Return the evidence of the first stopped worker that had printed its own exception; None if
    there is none.

    A worker whose script still ran (``in_script``) at the first failure had survived what it had
    printed until then.
    """
    for end in ends[:_READ_WHOLE]:
        if end.rank in seen or not end.told_to_stop:
            continue
        if in_script.get(end.rank, False) and printed_s(end) <= first_s:
            continue
        if was_stopped(end) or end.returncode == 0:
            evidence = _as_if_it_had_ended(end)
            if evidence.standing is Standing.CAUSE and evidence.exception_type and evidence.frame:
                return evidence
    return None


def _same(
    best: FailureEvidence, seen: dict[int, FailureEvidence], eligible: Sequence[WorkerExit]
) -> tuple[int, ...]:
    """Return the ranks that failed like ``best``: its own, then the others in the order of their
    exits."""
    ranks = [best.end.rank]
    lost = best.standing >= Standing.TIMED_OUT
    last = f"{best.exception_type}: {best.message}".encode() if best.exception_type else None
    for end in eligible:
        if end.rank == best.end.rank:
            continue
        evidence = seen.get(end.rank)
        if evidence is not None:
            alike = evidence.standing >= Standing.TIMED_OUT if lost else evidence.kind == best.kind
        else:
            alike = end.returncode == best.end.returncode and (
                last is None or last in end.stderr_tail[-4096:]
            )
        if alike:
            ranks.append(end.rank)
    return tuple(ranks)


def _stopped_alike(best: FailureEvidence, bad: Sequence[WorkerExit]) -> Iterator[int]:
    """Yield the ranks that had printed the error of ``best`` before they were stopped."""
    if best.standing is not Standing.CAUSE or best.exception_type is None:
        return
    last = best.exception_type.encode()
    alike = (
        end
        for end in bad
        if was_stopped(end) and end.returncode < 0 and last in end.stderr_tail[-4096:]
    )
    for end in islice(alike, _READ_WHOLE):
        if end.rank != best.end.rank and read(replace(end, returncode=1)).kind == best.kind:
            yield end.rank


def _hosts_of(best: FailureEvidence, ranks: tuple[int, ...], ends: Sequence[WorkerExit]) -> str:
    """Return the names of the hosts of these ranks."""
    those = set(ranks)
    hosts = {
        end.host: end.rank for end in sorted(ends, key=lambda end: -end.rank) if end.rank in those
    }
    if len(hosts) < 2:
        return best.end.host
    from distlaunch.core.model.host_list import name_hosts

    return name_hosts(sorted(hosts, key=lambda host: hosts[host]))


def _cause(best: FailureEvidence, ranks: tuple[int, ...], host: str, *, cause_seen: bool) -> Cause:
    return Cause(
        ranks=ranks,
        host=host,
        returncode=best.end.returncode,
        summary=best.summary if cause_seen else f"{best.summary}; no rank shows the original cause",
        exception_type=best.exception_type,
        message=best.message,
        original=best.original,
        frame=best.frame,
        excerpt=best.excerpt,
        last_words=best.last_words,
        stream=best.stream,
    )


def _waited(evidence: FailureEvidence) -> bool:
    return evidence.standing >= Standing.TIMED_OUT


def _of_awaited(awaited: Awaited, best: FailureEvidence, ends: Sequence[WorkerExit]) -> Cause:
    """Return the cause with the awaited ranks, and the exception and message of ``best``, a waiting
    rank."""
    hosts = {end.rank: end.host for end in ends}
    returncodes = {end.rank: end.returncode for end in ends}
    first = awaited.ranks[0]
    told_by, type_, message = best.end.rank, best.exception_type, best.message
    if awaited.stall is not None and type_ is not None:
        told_by, type_, message = awaited.stall.rank, None, awaited.stall.text
    return Cause(
        ranks=awaited.ranks,
        host=hosts.get(first, ""),
        returncode=returncodes.get(first, 0),
        summary=awaited.summary,
        exception_type=type_,
        message=message,
        frame=awaited.frame,
        excerpt=awaited.stack or (() if awaited.frame else best.excerpt),
        awaited=True,
        wait=awaited.wait,
        told_by=told_by,
    )


def _signature(best: FailureEvidence) -> tuple[str, str] | None:
    """Return a value that is equal for two failures of the same kind.

    A signal counts only if its Python line is known.
    """
    name = best.exception_type or (
        signal_name(-best.end.returncode) if best.end.returncode < 0 else None
    )
    return (name, best.frame) if name and best.frame else None


def _hint_at_others(
    ends: Sequence[WorkerExit],
    running: Sequence[int],
    world_size: int,
    lost: Collection[int],
) -> Hint | None:
    """Return a hint about the ranks that did not fail, one of which exited too early or hangs; None
    if there are none."""
    early = [end.rank for end in ends if end.returncode == 0 and not end.told_to_stop]
    if early:
        return hint_at_early_ends(early)
    late = sorted(
        {end.rank for end in ends if was_stopped(end) and end.rank not in lost} | set(running)
    )
    if late:
        return hint_at_running_ranks(late)
    known = {end.rank for end in ends}
    if missing := [rank for rank in range(world_size) if rank not in known]:
        return hint_at_missing_ranks(missing)
    return None


def _hint_to_meet(
    awaited: Awaited | None, best: FailureEvidence, known: Hint | None
) -> Hint | None:
    """Return the hint for the awaited ranks if their line, or their number of collectives, is
    known."""
    if awaited is None or (
        awaited.frame is None and awaited.state is not AwaitedState.BEHIND and not awaited.stall
    ):
        return None
    stall = awaited.stall.text if awaited.stall else ""
    text = f"{best.message or ''}\n{best.text}\n{stall}"
    return hint_for_awaited(awaited, text) or known or hint_at_different_collectives(DIFFERENT)


def _others(
    others: Sequence[WorkerExit],
    seen: dict[int, FailureEvidence],
    running: Sequence[int],
    lost: dict[int, FailureEvidence],
    *,
    world_size: int,
    after_grace: str | None,
) -> tuple[str, ...]:
    """Return a line on each kind of state of the other ranks, the most informative first."""
    kinds: dict[_Doing, list[int]] = {}
    for end in sorted(others, key=lambda end: (was_stopped(end), end.ended_s)):
        kinds.setdefault(
            _doing(end, seen.get(end.rank), lost.get(end.rank), after_grace), []
        ).append(end.rank)
    if running:
        kinds.setdefault(_Doing(one="still running"), []).extend(running)
    lines = [f"{name_ranks(ranks)}: {doing.text(ranks)}" for doing, ranks in kinds.items()]
    if len(lines) > _OTHERS:
        lines[_OTHERS - 1 :] = [
            f"and {len(lines) - _OTHERS + 1} more kinds of end, out of {world_size} ranks"
        ]
    return tuple(lines)


def _lost_before_the_stop(ends: Sequence[WorkerExit]) -> dict[int, FailureEvidence]:
    """Return the workers that showed a consequence of another worker's exit before they were
    stopped."""
    shown = (
        end
        for end in ends
        if was_stopped(end) and end.returncode < 0 and b"Traceback " in end.stderr_tail
    )
    found = {end.rank: read(replace(end, returncode=1)) for end in islice(shown, _READ_WHOLE)}
    return {
        rank: one
        for rank, one in found.items()
        if one.standing >= Standing.TIMED_OUT and one.exception_type
    }


def _symptom(evidence: FailureEvidence) -> str:
    match = _SYMPTOM.search(f"{evidence.message or ''}\n{evidence.text}")
    return f" ({match[0]})" if match else ""


def was_killed_by_us(end: WorkerExit) -> bool:
    """Return whether the launcher killed a worker that did not exit on request."""
    return end.told_to_stop and end.returncode == -signal.SIGKILL


class _Doing(Record):
    """The state of a rank as text, for one rank and for several."""

    one: str
    several: str | None = None

    def text(self, ranks: Sequence[int]) -> str:
        return self.one if self.several is None or len(ranks) == 1 else self.several


def _doing(
    end: WorkerExit,
    evidence: FailureEvidence | None,
    lost: FailureEvidence | None,
    after_grace: str | None,
) -> _Doing:
    if lost is not None:
        evidence = lost
    elif was_stopped(end) or (end.told_to_stop and end.returncode == 0):
        if was_killed_by_us(end):
            return _Doing(one=" ".join(filter(None, ("stopped by us, by KILL", after_grace))))
        return _Doing(one="stopped by us")
    if end.returncode == 0:
        return _Doing(one="ended with exit code 0")
    if evidence is None:
        return _Doing(one="ended badly after the first failure")
    if evidence.standing is Standing.LOST_PEER:
        symptom = _symptom(evidence)
        return _Doing(one=f"lost its peers{symptom}", several=f"lost their peers{symptom}")
    if evidence.standing is Standing.TIMED_OUT:
        return _Doing(one="timed out waiting for another rank")
    what = ": ".join(part for part in (evidence.exception_type, evidence.message) if part)
    where = f" ({evidence.frame})" if evidence.frame else ""
    more = f": {shorten_middle(what, _MORE_CHARS)}{where}" if what else ""
    failed = "" if evidence.summary == _PRINTED else "failed too, "
    return _Doing(one=f"{failed}{evidence.summary}{more}")
