"""What a running job does at one moment, for the commands that look at it and for its metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from distlaunch.core.model.record import Record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distlaunch.coordinator.policy.attempt import Attempt
    from distlaunch.coordinator.policy.job import JobPolicy
    from distlaunch.core.model.plan import LaunchPlan

STEP, LOSS, SAMPLES = "step", "loss", "samples"
"""Names of the numbers that workers report."""


class NodeSnapshot(Record):
    """A node of the newest attempt."""

    number: int
    """The same in all attempts."""
    host: str
    first_rank: int
    state: Literal["up", "lost"]


class WorkerSnapshot(Record):
    """A worker of the newest attempt. Unknown numbers are None."""

    rank: int
    node: int
    """The number of its node."""
    host: str
    pid: int | None
    state: Literal["starting", "running", "ended", "lost"]
    """``lost``: its node was lost while it ran."""
    returncode: int | None
    """-N for signal N; None while it runs."""
    step: float | None
    step_s: float | None
    """Seconds per step, over the last steps."""
    loss: float | None
    samples: float | None
    last_sign_age_s: float | None
    """Seconds since it started, wrote output or reported progress. Output counts only if the job
    looks for hangs."""
    progress_age_s: float | None = None
    """Seconds since it reported progress."""
    timed_steps: float = 0.0
    """Over how many steps ``step_s`` was measured."""


class JobSnapshot(Record):
    """A job at one moment. Unknown values are None."""

    job_id: str
    run_dir: str
    backend: str
    phase: str
    """See ``policy.job.Phase``."""
    attempt: int
    restarts: int
    max_restarts: int
    started: float
    """When the job started, in seconds since 1970."""
    world_size: int | None
    """None before the nodes of the attempt are known."""
    workers_up: int
    """Workers that run."""
    nodes: tuple[NodeSnapshot, ...]
    workers: tuple[WorkerSnapshot, ...]
    node_losses: int
    """Nodes that were lost, in all attempts."""
    failures: int
    """Workers that ended wrongly, in all attempts. Workers that were told to stop do not count."""
    output_bytes: int | None = None
    """Bytes that workers have written, in all attempts. With one launcher per node, only those of
    the coordinator's node."""


REUSE_S = 0.4
"""A snapshot serves further questions for this long, unless workers have started or ended."""


class Snapshots:
    """The snapshots of a job. Several observers that ask at almost the same time get the same one.

    Used by the main loop alone.
    """

    def __init__(self, run_dir: str, *, started: float) -> None:
        """Begin without a snapshot. ``started`` is in seconds since 1970."""
        self._run_dir = run_dir
        self._started = started
        self._latest: JobSnapshot | None = None
        self._latest_state: tuple[object, ...] = ()
        self._until = 0.0

    def take(
        self, policy: JobPolicy, plan: LaunchPlan, *, now: float, output_bytes: int | None = None
    ) -> JobSnapshot:
        """Return a snapshot of the time ``now`` on the job's clock, or a little before."""
        state = (
            *(plan.attempt, policy.attempt, policy.phase, policy.restarts),
            *(policy.up, policy.ended, policy.node_losses, policy.failed_workers),
        )
        if self._latest is None or now >= self._until or state != self._latest_state:
            self._latest = take_snapshot(
                policy,
                plan,
                run_dir=self._run_dir,
                started=self._started,
                now=now,
                output_bytes=output_bytes,
            )
            self._latest_state, self._until = state, now + REUSE_S
        return self._latest


def take_snapshot(
    policy: JobPolicy,
    plan: LaunchPlan,
    *,
    run_dir: str,
    started: float,
    now: float,
    output_bytes: int | None = None,
) -> JobSnapshot:
    """Return a snapshot of the job with the rank numbers that the user sees. Must be called in the
    main loop.

    ``started`` is in seconds since 1970, ``now`` is the time on the job's clock.
    """
    attempt = policy.newest_attempt
    return JobSnapshot(
        job_id=plan.job_id,
        run_dir=run_dir,
        backend=plan.backend,
        phase=policy.phase,
        attempt=policy.attempt,
        restarts=policy.restarts,
        max_restarts=policy.settings.max_restarts,
        started=started,
        world_size=policy.world_size or None,
        workers_up=max(0, policy.up - policy.ended),
        nodes=tuple(
            NodeSnapshot(
                number=node,
                host=attempt.nodes.host(node),
                first_rank=plan.first_shown + attempt.nodes.first_rank(node),
                state="up" if node in attempt.alive else "lost",
            )
            for node in attempt.nodes.numbers
        ),
        workers=tuple(_worker_snapshots(policy, attempt, first_shown=plan.first_shown, now=now)),
        node_losses=policy.node_losses,
        failures=policy.failed_workers,
        output_bytes=output_bytes,
    )


def _worker_snapshots(
    policy: JobPolicy, attempt: Attempt, *, first_shown: int, now: float
) -> list[WorkerSnapshot]:
    progress, ended = policy.progress, attempt.returncodes()
    workers = []
    for node in attempt.nodes.numbers:
        host, pids = attempt.nodes.host(node), attempt.pids(node)
        for rank in attempt.nodes.ranks(node):
            values: Mapping[str, float] = progress.latest.get(rank, {})
            sign_at = max(
                attempt.signs.get(rank, float("-inf")),
                progress.heartbeat_at_of.get(rank, float("-inf")),
            )
            state: Literal["starting", "running", "ended", "lost"] = "starting"
            if rank in ended:
                state = "lost" if ended[rank] is None else "ended"
            elif rank in pids:
                state = "running"
            workers.append(
                WorkerSnapshot(
                    rank=first_shown + rank,
                    node=node,
                    host=host,
                    pid=pids.get(rank),
                    state=state,
                    returncode=ended.get(rank),
                    step=values.get(STEP),
                    step_s=progress.step_s(rank, now),
                    timed_steps=progress.timed_steps(rank),
                    loss=values.get(LOSS),
                    samples=values.get(SAMPLES),
                    progress_age_s=None
                    if rank not in progress.heartbeat_at_of
                    else max(0.0, now - progress.heartbeat_at_of[rank]),
                    last_sign_age_s=max(0.0, now - sign_at) if sign_at > float("-inf") else None,
                )
            )
    return workers
