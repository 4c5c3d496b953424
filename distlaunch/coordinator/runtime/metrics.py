"""Write the metrics of a job as text for Prometheus. No I/O.

Series without labels describe the whole job, so their number does not grow with the job. Series of
ranks and of nodes exist only in jobs that are small enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING, Literal, get_args

from distlaunch.coordinator.policy.job import Phase
from distlaunch.core.model.record import Record
from distlaunch.diagnosis.stragglers import slowest_rank

if TYPE_CHECKING:
    from distlaunch.coordinator.runtime.node_questions import Answers
    from distlaunch.coordinator.runtime.snapshot import JobSnapshot

MOST_RANKS = 256
"""Largest number of workers of a job that has series of its ranks."""
MOST_NODES = 256
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Kind = Literal["gauge", "counter"]
Labels = Mapping[str, object]


class Metric(Record):
    """A metric. The names follow Prometheus' conventions for names and units."""

    name: str
    kind: Kind
    text: str
    """Its help text."""
    labels: tuple[str, ...] = ()


class LauncherUsage(Record):
    """What the launcher's process uses."""

    cpu_s: float
    memory_bytes: int
    started: float
    """When it started, in seconds since 1970."""


_RANK = ("rank", "host")
METRICS = (
    Metric(
        name="distlaunch_job_info",
        kind="gauge",
        text="The job. Always 1.",
        labels=("job_id", "backend", "run_dir", "version"),
    ),
    Metric(
        name="distlaunch_job_start_time_seconds",
        kind="gauge",
        text="When the job started, in seconds since 1970.",
    ),
    Metric(
        name="distlaunch_job_phase",
        kind="gauge",
        text="1 for the phase of the job, 0 for the others.",
        labels=("phase",),
    ),
    Metric(name="distlaunch_workers", kind="gauge", text="Workers of the attempt."),
    Metric(name="distlaunch_workers_up", kind="gauge", text="Workers that run."),
    Metric(name="distlaunch_nodes", kind="gauge", text="Nodes of the attempt."),
    Metric(name="distlaunch_nodes_up", kind="gauge", text="Nodes that were not lost."),
    Metric(name="distlaunch_attempt", kind="gauge", text="Number of the attempt, from 0."),
    Metric(
        name="distlaunch_restarts_total",
        kind="counter",
        text="Restarts that counted towards --max-restarts.",
    ),
    Metric(name="distlaunch_restarts_allowed", kind="gauge", text="The value of --max-restarts."),
    Metric(name="distlaunch_node_losses_total", kind="counter", text="Nodes that were lost."),
    Metric(
        name="distlaunch_worker_failures_total", kind="counter", text="Workers that ended wrongly."
    ),
    Metric(
        name="distlaunch_output_bytes_total",
        kind="counter",
        text="Bytes that workers have written to stdout and stderr.",
    ),
    Metric(name="distlaunch_step", kind="gauge", text="Lowest step of all ranks."),
    Metric(name="distlaunch_step_highest", kind="gauge", text="Highest step of all ranks."),
    Metric(
        name="distlaunch_step_seconds",
        kind="gauge",
        text="Median over the ranks of the seconds for a step.",
    ),
    Metric(
        name="distlaunch_slowest_step_seconds",
        kind="gauge",
        text="Seconds for a step of the slowest rank.",
    ),
    Metric(
        name="distlaunch_slowest_rank",
        kind="gauge",
        text="The rank with the slowest steps, if they differ from those of the others.",
    ),
    Metric(
        name="distlaunch_loss",
        kind="gauge",
        text="Newest number loss of the lowest rank that reports one.",
    ),
    Metric(
        name="distlaunch_samples",
        kind="gauge",
        text="Sum over the ranks of their newest numbers samples.",
    ),
    Metric(
        name="distlaunch_agent_cpu_seconds_total",
        kind="counter",
        text="Processor time of the agent of a node.",
        labels=("node", "host"),
    ),
    Metric(name="distlaunch_rank_up", kind="gauge", text="1 if the worker runs.", labels=_RANK),
    Metric(name="distlaunch_rank_step", kind="gauge", text="Newest step.", labels=_RANK),
    Metric(
        name="distlaunch_rank_step_seconds",
        kind="gauge",
        text="Seconds for a step, over the last steps.",
        labels=_RANK,
    ),
    Metric(name="distlaunch_rank_loss", kind="gauge", text="Newest number loss.", labels=_RANK),
    Metric(
        name="distlaunch_rank_samples", kind="gauge", text="Newest number samples.", labels=_RANK
    ),
    Metric(
        name="distlaunch_rank_last_sign_timestamp_seconds",
        kind="gauge",
        text="When the worker last showed a sign of life, in seconds since 1970.",
        labels=_RANK,
    ),
    Metric(
        name="distlaunch_rank_cpu_seconds_total",
        kind="counter",
        text="Processor time of the worker and its descendants.",
        labels=_RANK,
    ),
    Metric(
        name="distlaunch_rank_memory_bytes",
        kind="gauge",
        text="Resident memory of the worker and its descendants.",
        labels=_RANK,
    ),
    Metric(
        name="distlaunch_rank_gpu_ratio",
        kind="gauge",
        text="How busy the GPUs of the worker are, from 0 to 1.",
        labels=_RANK,
    ),
    Metric(
        name="distlaunch_rank_gpu_memory_bytes",
        kind="gauge",
        text="Memory of GPUs that the worker holds.",
        labels=_RANK,
    ),
    Metric(
        name="process_cpu_seconds_total",
        kind="counter",
        text="Processor time of the launcher.",
    ),
    Metric(
        name="process_resident_memory_bytes",
        kind="gauge",
        text="Memory of the launcher.",
    ),
    Metric(
        name="process_start_time_seconds",
        kind="gauge",
        text="When the launcher started, in seconds since 1970.",
    ),
)
"""All metrics, in the order of the text."""
_ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def metrics_text(
    snapshot: JobSnapshot,
    *,
    version: str,
    launcher: LauncherUsage | None,
    nodes: Answers | None,
    now: float,
) -> str:
    """Return the metrics. Those whose values are not known are left out.

    ``nodes``: what the nodes and their workers use. ``now``: when the snapshot was taken, in
    seconds since 1970.
    """
    values = {
        **_job_values(snapshot, version),
        **_progress_values(snapshot),
        **_rank_values(snapshot, now),
        **_usage_values(nodes, with_ranks=len(snapshot.workers) <= MOST_RANKS),
        **_launcher_values(launcher),
    }
    lines = []
    for metric in METRICS:
        samples = [(labels, value) for labels, value in values[metric.name] if value is not None]
        if not samples:
            continue
        lines.append(f"# HELP {metric.name} {metric.text}\n# TYPE {metric.name} {metric.kind}\n")
        lines.extend([f"{metric.name}{labels} {value!r}\n" for labels, value in samples])
    return "".join(lines)


_Samples = Iterable[tuple[str, float | None]]
"""Labels as text, and the value."""


def _single_sample(value: float | None) -> _Samples:
    return (("", value),)


def _job_values(snapshot: JobSnapshot, version: str) -> dict[str, _Samples]:
    info = {
        "job_id": snapshot.job_id,
        "backend": snapshot.backend,
        "run_dir": snapshot.run_dir,
        "version": version,
    }
    return {
        "distlaunch_job_info": ((_label_text(info), 1),),
        "distlaunch_job_start_time_seconds": _single_sample(snapshot.started),
        "distlaunch_job_phase": [
            (_label_text({"phase": phase}), int(phase == snapshot.phase))
            for phase in get_args(Phase)
        ],
        "distlaunch_workers": _single_sample(snapshot.world_size),
        "distlaunch_workers_up": _single_sample(snapshot.workers_up),
        "distlaunch_nodes": _single_sample(len(snapshot.nodes)),
        "distlaunch_nodes_up": _single_sample(sum(node.state == "up" for node in snapshot.nodes)),
        "distlaunch_attempt": _single_sample(snapshot.attempt),
        "distlaunch_restarts_total": _single_sample(snapshot.restarts),
        "distlaunch_restarts_allowed": _single_sample(snapshot.max_restarts),
        "distlaunch_node_losses_total": _single_sample(snapshot.node_losses),
        "distlaunch_worker_failures_total": _single_sample(snapshot.failures),
        "distlaunch_output_bytes_total": _single_sample(snapshot.output_bytes),
    }


def _progress_values(snapshot: JobSnapshot) -> dict[str, _Samples]:
    workers = snapshot.workers
    steps = [worker.step for worker in workers if worker.step is not None]
    times = {worker.rank: worker.step_s for worker in workers if worker.step_s is not None}
    measured = {
        worker.rank: (worker.step_s, worker.timed_steps)
        for worker in workers
        if worker.step_s is not None
    }
    losses = (worker.loss for worker in workers if worker.loss is not None)
    samples = [worker.samples for worker in workers if worker.samples is not None]
    return {
        "distlaunch_step": _single_sample(min(steps, default=None)),
        "distlaunch_step_highest": _single_sample(max(steps, default=None)),
        "distlaunch_step_seconds": _single_sample(median(times.values()) if times else None),
        "distlaunch_slowest_step_seconds": _single_sample(max(times.values(), default=None)),
        "distlaunch_slowest_rank": _single_sample(slowest_rank(measured)),
        "distlaunch_loss": _single_sample(next(losses, None)),
        "distlaunch_samples": _single_sample(sum(samples) if samples else None),
    }


def _rank_values(snapshot: JobSnapshot, now: float) -> dict[str, _Samples]:
    workers = snapshot.workers if len(snapshot.workers) <= MOST_RANKS else ()
    named = [(_rank_labels(worker.rank, worker.host), worker) for worker in workers]
    return {
        "distlaunch_rank_up": [(labels, int(each.state == "running")) for labels, each in named],
        "distlaunch_rank_step": [(labels, each.step) for labels, each in named],
        "distlaunch_rank_step_seconds": [(labels, each.step_s) for labels, each in named],
        "distlaunch_rank_loss": [(labels, each.loss) for labels, each in named],
        "distlaunch_rank_samples": [(labels, each.samples) for labels, each in named],
        "distlaunch_rank_last_sign_timestamp_seconds": [
            (labels, None if each.last_sign_age_s is None else round(now - each.last_sign_age_s, 3))
            for labels, each in named
        ],
    }


def _usage_values(nodes: Answers | None, *, with_ranks: bool) -> dict[str, _Samples]:
    answers = () if nodes is None else nodes.nodes
    known = [(each.node, each.host, each.usage) for each in answers if each.usage is not None]
    ranks = [
        (_rank_labels(worker.rank, host), worker)
        for _, host, usage in (known if with_ranks else ())
        for worker in usage.workers
    ]
    return {
        "distlaunch_agent_cpu_seconds_total": [
            (_label_text({"node": node, "host": host}), usage.agent_cpu_s)
            for node, host, usage in (known if len(known) <= MOST_NODES else ())
        ],
        "distlaunch_rank_cpu_seconds_total": [(labels, each.cpu_s) for labels, each in ranks],
        "distlaunch_rank_memory_bytes": [(labels, each.rss_bytes) for labels, each in ranks],
        "distlaunch_rank_gpu_ratio": [
            (labels, None if each.gpu_percent is None else each.gpu_percent / 100)
            for labels, each in ranks
        ],
        "distlaunch_rank_gpu_memory_bytes": [(labels, each.gpu_bytes) for labels, each in ranks],
    }


def _launcher_values(usage: LauncherUsage | None) -> dict[str, _Samples]:
    return {
        "process_cpu_seconds_total": _single_sample(None if usage is None else usage.cpu_s),
        "process_resident_memory_bytes": _single_sample(
            None if usage is None else usage.memory_bytes
        ),
        "process_start_time_seconds": _single_sample(None if usage is None else usage.started),
    }


@lru_cache(maxsize=4 * MOST_RANKS)
def _rank_labels(rank: int, host: str) -> str:
    """Return the labels of a rank, which many metrics have, at each reading."""
    return _label_text({"rank": rank, "host": host})


def _label_text(labels: Labels) -> str:
    return "{" + ",".join(_label_pairs(labels)) + "}"


def _label_pairs(labels: Labels) -> Iterator[str]:
    for name, value in labels.items():
        text = str(value).encode("utf-8", "replace").decode().translate(_ESCAPED)
        yield f'{name}="{text}"'
