"""Output of a job that is in files on other hosts."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from typing import Any

from distlaunch.core.model.record import Record
from distlaunch.core.model.run_files import EVENTS, plan_path
from distlaunch.core.model.text import name_ranks, printable
from distlaunch.jobs.events import read_events
from distlaunch.jobs.job import Job
from distlaunch.jobs.worker_logs import log_files

_MOST_PLAN_BYTES = 1 << 28


class OtherLogs(Record):
    """Logs of some ranks on another host."""

    host: str
    ranks: tuple[int, ...]
    directory: str
    """The directory there. If it is not known, empty: the launcher's log directory."""
    is_lost: bool
    """Whether the node was lost. What came before is here as well."""


def other_logs(job: Job, attempt: int, ranks: Collection[int] | None = None) -> list[OtherLogs]:
    """Return the logs of an attempt that are not here, or not completely.

    With one launcher per node, each launcher writes the logs of its ranks. With --node-logs, a node
    goes on writing after the launcher has lost it.
    """
    found = [*_logs_of_launchers(job, attempt), *_logs_of_lost_nodes(job, attempt)]
    chosen = (
        each
        if ranks is None
        else OtherLogs(
            host=each.host,
            ranks=tuple(rank for rank in each.ranks if rank in ranks),
            directory=each.directory,
            is_lost=each.is_lost,
        )
        for each in found
    )
    return [each for each in chosen if each.ranks]


def other_logs_line(logs: OtherLogs, job: Job) -> str:
    """Return the sentence that says where these logs are."""
    host, who = printable(logs.host), name_ranks(logs.ranks)
    if logs.is_lost:
        return (
            f"{host} was lost; what its {who} wrote after that is there in "
            f"{printable(logs.directory)}"
        )
    return f"the output of {who} is on {host}, in {printable(job.name)} of the log directory there"


def _logs_of_launchers(job: Job, attempt: int) -> Iterator[OtherLogs]:
    if not job.launchers:
        return
    here = {file.rank for file in log_files(job, attempt)}
    hosts_here = {job.host, *_hosts_of_launchers(job)}
    for host, ranks in _nodes_of_plan(plan_path(job.path, attempt)):
        if ranks and not here.intersection(ranks) and host not in hosts_here:
            yield OtherLogs(host=host, ranks=ranks, directory="", is_lost=False)


def _hosts_of_launchers(job: Job) -> Iterator[str]:
    stem, dot, ending = EVENTS.partition(".")
    try:
        names = os.listdir(job.path)
    except OSError:
        return
    for name in names:
        if name.startswith(f"{stem}-") and name.endswith(dot + ending):
            for event in read_events(os.path.join(job.path, name)):
                if isinstance(host := event.get("host"), str):
                    yield host
                    break


def _logs_of_lost_nodes(job: Job, attempt: int) -> Iterator[OtherLogs]:
    if not job.node_logs:
        return
    directory = os.path.join(job.cwd, job.node_logs, job.job_id, f"attempt-{attempt}")
    for event in read_events(job.events):
        match event:
            case {"type": "node_lost", "host": str(host), "attempt": int(lost), "ranks": list(raw)}:
                ranks = tuple(rank for rank in raw if isinstance(rank, int))
                if lost == attempt and ranks:
                    yield OtherLogs(host=host, ranks=ranks, directory=directory, is_lost=True)
            case _:
                continue


def _nodes_of_plan(path: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(path, flags), "rb") as file:
            plan: Any = json.loads(file.read(_MOST_PLAN_BYTES))
    except (OSError, ValueError, RecursionError):
        return
    nodes = plan.get("nodes") if isinstance(plan, dict) else None
    for node in nodes if isinstance(nodes, list) else ():
        match node:
            case {"host": str(host), "workers": list(workers)}:
                yield (
                    host,
                    tuple(
                        worker["rank"]
                        for worker in workers
                        if isinstance(worker, dict) and isinstance(worker.get("rank"), int)
                    ),
                )
            case _:
                continue
