"""Whether a failed attempt is worth another. Pure; diagnosis is imported when something has
failed."""

from __future__ import annotations

from collections.abc import Sequence

from distlaunch.coordinator.policy.job_settings import PolicySettings
from distlaunch.core.model.record import Record, replace
from distlaunch.core.protocol import agent_messages as m
from distlaunch.diagnosis.model import Diagnosis, RepeatKind, WorkerEnd

SHORT_TAIL_BYTES = 2048
"""Enough of a failed worker's last words to tell symptom from cause."""


def after_grace(settings: PolicySettings) -> str:
    """Say why workers were killed that had not ended when they were told to."""
    return settings.dialect.spelt(f"after the {settings.failure_grace_s:g} s of --failure-grace")


def diagnose(
    ends: Sequence[WorkerEnd],
    settings: PolicySettings,
    *,
    world_size: int,
    after_grace: str | None,
    master_port: int | None = None,
) -> Diagnosis:
    """Find the first cause, among the workers that ended badly; its hint speaks the user's
    dialect."""
    from distlaunch.diagnosis.first_cause import diagnose as find

    found = find(
        ends,
        world_size=world_size,
        python=settings.python,
        after_grace=after_grace,
        adds_local_rank=settings.adds_local_rank,
        dashes_first=settings.dashes_first,
        master_port=master_port,
    )
    return replace(found, hint=settings.dialect.spelt(found.hint)) if found.hint else found


def diagnose_stop(
    ends: Sequence[WorkerEnd], settings: PolicySettings, *, world_size: int
) -> Diagnosis | None:
    """Explain how workers failed after the job was told to stop; None if none did."""
    if all(end.returncode == 0 for end in ends):
        return None  # and diagnosis need not be imported
    from distlaunch.diagnosis.first_cause import diagnose_stop as find

    found = find(ends, world_size=world_size, python=settings.python)
    return (
        replace(found, hint=settings.dialect.spelt(found.hint)) if found and found.hint else found
    )


def doing(
    ends: Sequence[WorkerEnd], *, world_size: int, after_grace: str | None
) -> tuple[str, ...]:
    """Say what all workers were doing, where something else than a worker is the cause."""
    from distlaunch.diagnosis.first_cause import doing as find

    return find(ends, world_size=world_size, after_grace=after_grace)


def looks_like_consequence(end: WorkerEnd) -> bool:
    """Tell whether this failure is more likely a symptom of another worker's."""
    from distlaunch.diagnosis.first_cause import looks_like_consequence as looks

    return looks(end)


def may_be_shared(end: WorkerEnd) -> bool:
    """Tell whether the other ranks may be about to end by the same exception."""
    return end.error_file is not None or (end.returncode > 0 and bool(end.stderr_tail.strip()))


def worker_end(
    message: m.WorkerExited, *, host: str, first_rank: int, ended_s: float, whole: bool
) -> WorkerEnd:
    """Keep of a worker's end what diagnosis reads; unless ``whole`` only the last of its last
    words."""
    return WorkerEnd(
        rank=message.rank,
        local_rank=message.rank - first_rank,
        host=host,
        pid=message.pid,
        returncode=message.returncode,
        ended_s=ended_s,
        uptime_s=message.uptime_s,
        told_to_stop=message.told_to_stop,
        stderr_tail=message.tail if whole else message.tail[-SHORT_TAIL_BYTES:],
        error_file=message.error_file.encode()
        if whole and message.error_file is not None
        else None,
        oom_kills=message.oom_kills,
    )


class Outcome(Record):
    """What the restart rule keeps of a failed attempt."""

    signature: tuple[str, str] | None
    repeats: RepeatKind | None
    progressed: bool
    """It came to a step beyond the best before; where no steps are reported, it ran for
    --min-uptime."""
    by_steps: bool = False
    """Steps are reported."""
    enough_s: float | None = None
    """So long it ran, if that is what counted as progress."""

    @staticmethod
    def of(
        diagnosis: Diagnosis,
        failures: Sequence[WorkerEnd],
        *,
        min_uptime_s: float,
        went_on: bool | None,
    ) -> Outcome:
        """Sum up an attempt; ``went_on`` is what its heartbeats say of its progress, if
        anything."""
        first = diagnosis.cause.ranks[0]
        uptime_s = next((end.uptime_s for end in failures if end.rank == first), 0.0)
        outcome = Outcome.after(
            diagnosis.signature, uptime_s, min_uptime_s=min_uptime_s, went_on=went_on
        )
        return replace(outcome, repeats=diagnosis.repeats)

    @staticmethod
    def after(
        signature: tuple[str, str] | None,
        lived_s: float,
        *,
        min_uptime_s: float,
        went_on: bool | None,
    ) -> Outcome:
        """Sum up an attempt that went well for so long."""
        long_enough = lived_s >= min_uptime_s
        return Outcome(
            signature=signature,
            repeats=None,
            progressed=long_enough if went_on is None else went_on,
            by_steps=went_on is not None,
            enough_s=lived_s if went_on is None and long_enough and min_uptime_s > 0 else None,
        )

    def is_same(self, other: Outcome | None) -> bool:
        """Tell whether it failed at the same place as another attempt, in the same way."""
        return (
            other is not None and self.signature is not None and self.signature == other.signature
        )


def _progress_hint(outcome: Outcome) -> str:
    if outcome.by_steps:
        return "progress is a higher step (heartbeat) than in any attempt before"
    return (
        "without heartbeats (`distlaunch help progress`) only an attempt of --min-uptime counts "
        "as\n"
        "    progress; --min-uptime 0 has every failure tried again"
    )


def _retried_hint(retried_s: float) -> str:
    return (
        f"the same failure was tried again: without heartbeats (`distlaunch help progress`),\n"
        f"    {retried_s:.1f} s of uptime counted as progress; use heartbeats, or a longer "
        "--min-uptime"
    )


def why_final(
    outcome: Outcome,
    previous: Outcome | None,
    *,
    used: int,
    allowed: int,
    window_s: float | None,
    retried_s: float | None = None,
    cut_off: bool = False,
) -> str | None:
    """Say why there is no further attempt, or None if there is one. An empty text: nothing was
    asked for.

    ``retried_s``: this very failure has been tried again before, because of so much uptime.
    ``cut_off``: there is no way to any node any more.
    """
    if allowed == 0:
        return ""
    if outcome.repeats is not None and not outcome.progressed:
        article = "an" if outcome.repeats[0] in "aeio" else "a"  # "a usage error"
        return f"not restarted: {article} {outcome.repeats} would repeat"
    if used >= allowed:
        within = f" within {window_s:g} s" if window_s is not None else ""
        used_up = f"all {allowed} restarts are" if allowed > 1 else "the one restart is"
        hint = f"\n  hint: {_retried_hint(retried_s)}" if retried_s is not None else ""
        return f"{used_up} used up{within}{hint}"
    if outcome.is_same(previous) and not outcome.progressed:
        return (
            "not restarted: the same failure twice without progress\n  hint: "
            f"{_progress_hint(outcome)}"
        )
    return "not restarted: no node can be reached any more" if cut_off else None
