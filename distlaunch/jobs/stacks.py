"""Ask the launcher of a running job for the stacks of its workers, and format them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from distlaunch.core.errors import UsageError
from distlaunch.core.model.record import Record, defaults_of, fields_of, plain
from distlaunch.core.model.text import name_ranks, printable
from distlaunch.core.protocol import agent_messages as m
from distlaunch.diagnosis.clean_text import shorten
from distlaunch.diagnosis.collectives import GroupOrder, group_orders
from distlaunch.diagnosis.hang import describe_places
from distlaunch.jobs.ask_running import NotNowError, ask_running, refuse_odd_answers
from distlaunch.jobs.control import ANSWER_S
from distlaunch.jobs.job import Job

_ANSWER_S = 7.0
"""How long the launcher may take: it waits some seconds for nodes that do not answer."""
_NATIVE_ANSWER_S = 15.0
_NATIVE_LINES = 60
_WIDTH = 160


class StackReport(Record):
    """Where the workers of a job are."""

    text: str
    record: Mapping[str, Any]
    """The fields of ``--format json``."""


def read_stacks(
    job: Job, ranks: Collection[int] | None, *, command: str, native: bool = False
) -> StackReport:
    """Ask for the stacks of a job's workers, and return those of ``ranks``; None: of all.

    ``native``: with native frames, where py-spy is installed. ``command`` is the user's command.
    Raises ConfigError if the job cannot be asked, and UsageError for a rank that does not run.
    """
    timeout_s = _NATIVE_ANSWER_S if native else _ANSWER_S
    with refuse_odd_answers(job):
        snapshot = ask_running(job, command, "snapshot", timeout_s=ANSWER_S)
        answers = ask_running(job, command, "stacks", timeout_s=timeout_s, native=native)
        if snapshot["attempt"] != answers["attempt"]:
            raise _restart_error(job)
        again = None
        if any(order.behind for order in _orders(answers, ranks, ())):
            # The ranks of a job that goes on have answered at different collectives.
            again = ask_running(job, command, "stacks", timeout_s=_ANSWER_S, native=False)
            if again["attempt"] != answers["attempt"]:
                raise _restart_error(job)
        return report_of(job.name, snapshot, answers, ranks, native=native, again=again)


def _restart_error(job: Job) -> NotNowError:
    return NotNowError(
        f"job {printable(job.name)}: a restart has begun meanwhile", hint="ask again"
    )


def report_of(
    name: str,
    snapshot: Mapping[str, Any],
    answers: Mapping[str, Any],
    ranks: Collection[int] | None,
    *,
    native: bool = False,
    again: Mapping[str, Any] | None = None,
) -> StackReport:
    """Return the report of the launcher's answers, which may come from another release.

    ``name`` is the job's name in ``ps``. ``again``: a second answer to the request for stacks, which
    shows whether ranks are behind. Raises UsageError for a rank that does not run.
    """
    workers = {worker["rank"]: worker for worker in snapshot["workers"]}
    running = [rank for rank, worker in workers.items() if worker["state"] == "running"]
    if ranks is not None and (missing := sorted(set(ranks) - set(running))):
        raise UsageError(
            f"{name_ranks(missing)} of job {printable(name)}: not running",
            hint=f"{name_ranks(running)} of attempt {snapshot['attempt']} run" if running else None,
        )
    stacks = _stacks(answers, ranks)
    orders = _orders(answers, ranks, tuple(workers), again)
    known = {stack.rank for stack in stacks}
    unanswered = [
        rank for rank in running if rank not in known and (ranks is None or rank in ranks)
    ]
    places = describe_places(
        stacks,
        unanswered=unanswered,
        steps={rank: each["step"] for rank, each in workers.items() if each["step"] is not None},
        hosts=lambda rank: workers[rank]["host"] if rank in workers else "",
        script_dir=answers.get("script_dir", ""),
        behind={rank for order in orders for rank in order.behind},
    )
    text = places.text
    groups: list[dict[str, Any]] = [dict(group) for group in places.groups]
    by_rank = {stack.rank: stack for stack in stacks}
    for group in groups:
        found = [
            frames for rank in group["ranks"][:1] if (frames := _native_frames(by_rank.get(rank)))
        ]
        group["native"] = found[0] if found else None
        if found:
            text += f"native frames of rank {group['ranks'][0]}:\n"
            text += "".join(f"    {shorten(printable(line), _WIDTH)}\n" for line in found[0])
    if native and not any(group["native"] for group in groups):
        text += "no native frames: py-spy is not installed on the nodes, or may not read workers\n"
    text += "".join(f"{order.words}\n" for order in orders)
    silent = [stack.rank for stack in stacks if not stack.process_groups]
    if orders and silent:
        text += f"{name_ranks(silent)}: no record of collectives\n"
    ended = sorted(rank for rank, each in workers.items() if each["state"] == "ended")
    if ended and ranks is None:
        text += f"{name_ranks(ended)}: ended\n"
    return StackReport(
        text=text,
        record={
            "name": name,
            "job_id": snapshot["job_id"],
            "attempt": answers["attempt"],
            "groups": groups,
            "process_groups": [plain(order) for order in orders],
            "ended": ended,
            "unanswered": unanswered,
        },
    )


def _native_frames(stack: m.Stack | None) -> list[str]:
    """Return the frames of the main thread in what py-spy has printed, innermost first."""
    frames: list[str] = []
    if stack is None:
        return frames
    for line in stack.native.splitlines():
        if line.startswith("    "):
            frames.append(line.strip())
        elif frames:
            break
    return frames[:_NATIVE_LINES]


def _orders(
    answers: Mapping[str, Any],
    ranks: Collection[int] | None,
    world: Sequence[int],
    again: Mapping[str, Any] | None = None,
) -> list[GroupOrder]:
    first, second = (
        {stack.rank: stack.process_groups for stack in _stacks(each, ranks)}
        for each in (answers, again or answers)
    )
    return group_orders(first, second, world=world)


def _stacks(answers: Mapping[str, Any], ranks: Collection[int] | None) -> list[m.Stack]:
    return [
        _read_stack(each)
        for node in answers["nodes"]
        for each in node["stacks"] or ()
        if ranks is None or each["rank"] in ranks
    ]


def _read_stack(given: Mapping[str, Any]) -> m.Stack:
    """Return a stack with the fields that this release knows."""
    known = _known_fields(m.Stack, given)
    known["process_groups"] = tuple(
        m.ProcessGroup(**_known_fields(m.ProcessGroup, each))
        for each in given.get("process_groups", ())
    )
    return m.Stack(**known)


def _known_fields(kind: type[Record], given: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: given[name] for name in fields_of(kind) if name in given}
    return {**defaults_of(kind), **known}
