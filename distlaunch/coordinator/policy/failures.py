"""Diagnose the failures of an attempt. No I/O.

``diagnosis`` is imported only when a worker has failed.
"""

from __future__ import annotations

from collections.abc import Sequence

from distlaunch.coordinator.policy.job_settings import PolicySettings
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import name_ranks, printable
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from distlaunch.diagnosis.model import Cause, Diagnosis

_LINES = 20
"""Most lines of output in a report without a first cause."""


def after_grace(settings: PolicySettings) -> str:
    """Return why workers that did not end on request were killed, for the report."""
    return f"after the {settings.failure_grace_s:g} s of {Opt.FAILURE_GRACE}"


def diagnose(
    ends: Sequence[WorkerExit],
    settings: PolicySettings,
    *,
    world_size: int,
    after_grace: str | None,
    master_port: int | None = None,
    stacks: Sequence[m.Stack] = (),
) -> Diagnosis:
    """Return the first cause among the exits of the workers."""
    from distlaunch.diagnosis.first_cause import diagnose as find

    return find(
        ends,
        world_size=world_size,
        python=settings.python,
        after_grace=after_grace,
        adds_local_rank=settings.adds_local_rank,
        dashes_first=settings.dashes_first,
        master_port=master_port,
        stacks=stacks,
        script_dir=settings.script_dir,
    )


def exits_alone(ends: Sequence[WorkerExit]) -> Diagnosis:
    """Return how workers ended, without a search for the first cause, which has failed.

    The first worker that failed by itself is named first, with the last lines that it wrote.
    """
    kinds: dict[tuple[int, bool], list[WorkerExit]] = {}
    for end in sorted(ends, key=lambda end: (end.told_to_stop, end.ended_s)):
        if end.returncode:
            kinds.setdefault((end.returncode, end.told_to_stop), []).append(end)
    if not kinds:
        cause = Cause(ranks=(), host="", returncode=1, summary="no worker reported a failure")
        return Diagnosis(cause=cause, exit_code=1)
    (code, _), alike = next(iter(kinds.items()))
    lines = alike[0].stderr_tail.decode("utf-8", "backslashreplace").splitlines()[-_LINES:]
    cause = Cause(
        ranks=tuple(end.rank for end in alike),
        host=alike[0].host,
        returncode=code,
        summary=_how(code),
        excerpt=tuple(map(printable, lines)),
        last_words=True,
    )
    others = [
        f"{name_ranks(end.rank for end in found)}: {_how(code)}{', told to stop' if told else ''}"
        for (code, told), found in [*kinds.items()][1:]
    ]
    return Diagnosis(cause=cause, exit_code=code if code > 0 else 128 - code, others=tuple(others))


def _how(returncode: int) -> str:
    return f"killed by signal {-returncode}" if returncode < 0 else f"exit code {returncode}"


def diagnose_stop(
    ends: Sequence[WorkerExit], settings: PolicySettings, *, world_size: int
) -> Diagnosis | None:
    """Return how workers failed after a request to stop, if any did."""
    if all(end.returncode == 0 for end in ends):
        return None  # so that diagnosis need not be imported
    from distlaunch.diagnosis.first_cause import diagnose_stop as find

    return find(ends, world_size=world_size, python=settings.python)


def doing(
    ends: Sequence[WorkerExit], *, world_size: int, after_grace: str | None
) -> tuple[str, ...]:
    """Return lines on the state of the workers, for an attempt that another event ended."""
    from distlaunch.diagnosis.first_cause import doing as find

    return find(ends, world_size=world_size, after_grace=after_grace)


def exceptions_of_threads(ends: Sequence[WorkerExit]) -> tuple[str, ...]:
    """Return lines on threads and child processes that an exception or a crash has ended."""
    marks = (b"Traceback ", b"Fatal Python error: ")
    if not any(mark in end.stderr_tail for end in ends for mark in marks):
        return ()
    from distlaunch.diagnosis.first_cause import exceptions_of_threads as find

    return find(ends)


def what_ranks_wrote(ends: Sequence[WorkerExit], behind: Sequence[int]) -> tuple[str, ...]:
    """Return lines of ranks of a hung attempt about their wait. ``behind`` hold up the others."""
    from distlaunch.diagnosis.first_cause import what_ranks_wrote as find

    return find(ends, sorted(end.rank for end in ends), behind) if behind else ()


def looks_like_consequence(end: WorkerExit) -> bool:
    """Return whether a failure is probably a symptom of another worker's."""
    from distlaunch.diagnosis.first_cause import looks_like_consequence as looks

    return looks(end)


def may_be_shared(end: WorkerExit) -> bool:
    """Return whether other ranks may soon end with the same exception."""
    return end.error_file is not None or (end.returncode > 0 and bool(end.stderr_tail.strip()))
