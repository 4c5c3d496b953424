"""What each rank and node of a running job uses: the figures of ``distlaunch top``. No I/O.

The launcher's answers are read as plain data: they may come from another release.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from distlaunch.core.model.record import Record
from distlaunch.diagnosis.stragglers import Straggler, are_equal, find_stragglers


class RankRow(Record):
    """One worker. Unknown figures are None."""

    rank: int
    node: int
    host: str
    pid: int | None
    state: str
    """starting, running, ended or lost."""
    returncode: int | None
    cpu_percent: float | None
    """100 is one processor. Descendants count, too."""
    rss_bytes: int | None
    gpus: tuple[int, ...]
    gpu_percent: float | None
    gpu_bytes: int | None
    step: float | None
    step_s: float | None
    loss: float | None
    last_sign_age_s: float | None
    straggler: Straggler | None


class NodeRow(Record):
    """One node. Rates are bytes per second."""

    number: int
    host: str
    state: str
    """up, lost, or silent: it has not answered in time."""
    ranks: tuple[int, ...]
    cpus: int | None
    cpu_percent: float | None
    """Of the job's workers on the node; 100 is one processor."""
    agent_cpu_percent: float | None
    memory_bytes: int | None
    used_bytes: int | None
    received_per_s: float | None
    sent_per_s: float | None
    read_per_s: float | None
    written_per_s: float | None


class TopView(Record):
    """A job at one moment."""

    name: str
    """The name of the run directory, as in ``ps``."""
    job_id: str
    phase: str
    attempt: int
    restarts: int
    max_restarts: int
    started: float
    """Seconds since 1970."""
    world_size: int | None
    workers_up: int
    ranks: tuple[RankRow, ...]
    """By rank."""
    nodes: tuple[NodeRow, ...]
    unanswered: tuple[str, ...]
    """Hosts of nodes that have not answered in time."""
    equal_step_times: bool
    """Whether the running ranks have equal step times, as ranks that wait for each other have."""


class RankOrder(Enum):
    """How ranks are sorted."""

    SLOWEST = "slowest"
    RANK = "rank"
    CPU = "cpu"
    MEMORY = "memory"
    GPU = "gpu"
    SILENT = "silent"


def view_of(
    snapshot: Mapping[str, Any],
    usage: Mapping[str, Any] | None,
    before: Mapping[str, Any] | None = None,
    *,
    name: str = "",
) -> TopView:
    """Return the figures from the launcher's answers to ``snapshot`` and ``usage``.

    ``before`` is an earlier answer to ``usage``. Without one of the same attempt, rates are None,
    and the CPU share of a worker is the mean since its start. ``name``: that of the run directory,
    by default the job id.
    """
    by_node, earlier = _usage_by_node(usage), _usage_by_node(before)
    if before is not None and usage is not None and before.get("attempt") != usage.get("attempt"):
        earlier = {}
    workers = {
        worker["rank"]: (worker, _seconds_between(earlier, node, found))
        for node, found in by_node.items()
        for worker in found["workers"]
    }
    earlier_workers = {
        worker["rank"]: worker for found in earlier.values() for worker in found["workers"]
    }
    given = snapshot["workers"]
    step_times = {
        each["rank"]: (each["step_s"], each.get("timed_steps") or 0.0)
        for each in given
        if each.get("step_s") is not None and each["state"] == "running"
    }
    slow = find_stragglers(step_times)
    ranks = tuple(
        _rank_row(each, *workers.get(each["rank"], (None, None)), earlier_workers, slow)
        for each in sorted(given, key=lambda each: each["rank"])
    )
    unanswered = tuple(() if usage is None else usage["unanswered"])
    return TopView(
        name=name or snapshot["job_id"],
        job_id=snapshot["job_id"],
        phase=snapshot["phase"],
        attempt=snapshot["attempt"],
        restarts=snapshot["restarts"],
        max_restarts=snapshot["max_restarts"],
        started=snapshot["started"],
        world_size=snapshot["world_size"],
        workers_up=snapshot["workers_up"],
        ranks=ranks,
        nodes=tuple(
            _node_row(each, by_node.get(each["number"]), earlier, ranks, unanswered)
            for each in snapshot["nodes"]
        ),
        unanswered=unanswered,
        equal_step_times=are_equal(step_times),
    )


def _usage_by_node(usage: Mapping[str, Any] | None) -> dict[int, Mapping[str, Any]]:
    if usage is None:
        return {}
    return {each["node"]: each["usage"] for each in usage["nodes"] if each["usage"] is not None}


def _seconds_between(
    earlier: Mapping[int, Mapping[str, Any]], node: int, now: Mapping[str, Any]
) -> float | None:
    if node not in earlier:
        return None
    elapsed_s: float = now["clock_s"] - earlier[node]["clock_s"]
    return elapsed_s if elapsed_s > 0 else None


def _rank_row(
    given: Mapping[str, Any],
    worker: Mapping[str, Any] | None,
    elapsed_s: float | None,
    earlier: Mapping[int, Mapping[str, Any]],
    slow: Mapping[int, Straggler],
) -> RankRow:
    rank = given["rank"]
    used = worker or {}
    first = earlier.get(rank)
    cpu_percent = None
    if worker is not None and first is not None and elapsed_s and first["pid"] == worker["pid"]:
        cpu_percent = round(max(0.0, worker["cpu_s"] - first["cpu_s"]) / elapsed_s * 100, 1)
    elif worker is not None and first is None and worker["age_s"] > 0:  # since it started
        cpu_percent = round(worker["cpu_s"] / worker["age_s"] * 100, 1)
    return RankRow(
        rank=rank,
        node=given["node"],
        host=given["host"],
        pid=given["pid"],
        state=given["state"],
        returncode=given["returncode"],
        cpu_percent=cpu_percent,
        rss_bytes=used.get("rss_bytes"),
        gpus=tuple(used.get("gpus", ())),
        gpu_percent=used.get("gpu_percent"),
        gpu_bytes=used.get("gpu_bytes"),
        step=given["step"],
        step_s=given["step_s"],
        loss=given["loss"],
        last_sign_age_s=given["last_sign_age_s"],
        straggler=slow.get(rank),
    )


def _node_row(
    given: Mapping[str, Any],
    usage: Mapping[str, Any] | None,
    earlier: Mapping[int, Mapping[str, Any]],
    ranks: Sequence[RankRow],
    unanswered: Sequence[str],
) -> NodeRow:
    number = given["number"]
    own = [row for row in ranks if row.node == number]
    found = usage or {}
    elapsed_s = None if usage is None else _seconds_between(earlier, number, usage)
    first = earlier.get(number, {})

    def rate(read: Any) -> float | None:
        if usage is None or elapsed_s is None:
            return None
        return float(max(0.0, read(usage) - read(first)) / elapsed_s)

    agent = rate(lambda each: each["agent_cpu_s"])
    busy = [row.cpu_percent for row in own if row.cpu_percent is not None]
    return NodeRow(
        number=number,
        host=given["host"],
        state="silent"
        if given["state"] == "up" and given["host"] in unanswered
        else given["state"],
        ranks=tuple(row.rank for row in own),
        cpus=found.get("cpus"),
        cpu_percent=round(sum(busy), 1) if busy else None,
        agent_cpu_percent=None if agent is None else round(agent * 100, 2),
        memory_bytes=found.get("memory_bytes"),
        used_bytes=None if usage is None else usage["memory_bytes"] - usage["available_bytes"],
        received_per_s=rate(lambda each: _sum_interfaces(each, "received_bytes")),
        sent_per_s=rate(lambda each: _sum_interfaces(each, "sent_bytes")),
        read_per_s=rate(lambda each: each["read_bytes"]),
        written_per_s=rate(lambda each: each["written_bytes"]),
    )


def _sum_interfaces(usage: Mapping[str, Any], field: str) -> int:
    return sum(each[field] for each in usage["interfaces"])


def sorted_ranks(rows: Iterable[RankRow], order: RankOrder) -> list[RankRow]:
    """Return the rows with the largest figure first, or by rank. Unknown figures come last, and
    with ``SLOWEST`` the stragglers come before all others."""

    def key(row: RankRow) -> tuple[Any, ...]:
        figures: dict[RankOrder, float | None] = {
            RankOrder.SLOWEST: row.step_s,
            RankOrder.RANK: -row.rank,
            RankOrder.CPU: row.cpu_percent,
            RankOrder.MEMORY: row.rss_bytes,
            RankOrder.GPU: row.gpu_percent,
            RankOrder.SILENT: row.last_sign_age_s,
        }
        figure = figures[order]
        marked = order is RankOrder.SLOWEST and row.straggler is not None
        return not marked, figure is None, -(figure or 0.0), row.rank

    return sorted(rows, key=key)
