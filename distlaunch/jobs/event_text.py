"""Events as text for people. No I/O.

A function named as a type of events (``_node_lost``) yields the sentence of such an event, and
perhaps more lines.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, cast

from distlaunch.core.model.duration import format_duration
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import counted, format_size, name_ranks, printable
from distlaunch.jobs.show import script_words, signal_name
from distlaunch.jobs.status import one_line, read_failure, read_rank

_MOST_PIDS = 4
"""Process ids are shown of this many workers that started at once."""
_MOST_PROCESSES = 8
_MOST_HOSTS = 8
_LONGEST_LINE = 500
_KIND_WIDTH = 17
"""Most types are not longer."""
_INDENT = "    "

_Event = Mapping[str, Any]
_Lines = Iterator[str]


class Severity(Enum):
    """How bad an event is. The values are the SGR parameters of its colour."""

    NORMAL = ""
    GOOD = "32"
    WARNING = "33"
    BAD = "31"


class _Kind(Record):
    """How the events of a type are shown."""

    lines: Callable[[Any], _Lines]
    """Yields the sentence of an event, and more lines. Texts may have any characters. Raises
    KeyError, TypeError, ValueError or AttributeError for a damaged event."""
    severity: Callable[[_Event], Severity] = lambda _: Severity.NORMAL


def event_kinds() -> Sequence[str]:
    """Return the types of events that this release knows."""
    return list(_KINDS)


def event_lines(event: _Event, *, with_date: bool = False, colour: bool = False) -> list[str]:
    """Return the line of an event, and further lines, indented. No line has control characters of
    the event's texts."""
    kind = str(event.get("type"))
    known = _KINDS.get(kind)
    severity = Severity.NORMAL
    try:
        texts = _safe_lines(_fields_line(event) if known is None else known.lines(event))
        severity = Severity.NORMAL if known is None else known.severity(event)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        texts = _safe_lines(_fields_line(event))
    first, *more = texts
    when, kind = _time_text(event, with_date=with_date), printable(kind).ljust(_KIND_WIDTH)
    if colour:
        when = f"\x1b[2m{when}\x1b[0m"
        kind = f"\x1b[{severity.value}m{kind}\x1b[0m" if severity.value else kind
    return [f"{when}  {kind}  {first}".rstrip(), *(f"{_INDENT}{line}" for line in more if line)]


def _safe_lines(texts: _Lines) -> list[str]:
    return [printable(one_line(text, most=_LONGEST_LINE)) for text in texts]


def day_of(seconds: object) -> tuple[int, ...] | None:
    """Return the local day of a time in seconds since 1970; None if it is no time."""
    if not isinstance(seconds, (int, float)):
        return None
    try:
        return time.localtime(seconds)[:3]
    except (OverflowError, OSError, ValueError):
        return None


def _time_text(event: _Event, *, with_date: bool) -> str:
    when: Any = event.get("time")
    if day_of(when) is None:
        return "time not known"
    form = "%Y-%m-%d %H:%M:%S" if with_date else "%H:%M:%S"
    return f"{time.strftime(form, time.localtime(when))}.{int(when % 1 * 1000):03d}"


def _fields_line(event: _Event) -> _Lines:
    yield " ".join(
        f"{name}={_field_text(value)}"
        for name, value in event.items()
        if name not in ("time", "type", "schema")
    )


def _field_text(value: object) -> str:
    is_word = isinstance(value, str) and value and not any(map(str.isspace, value))
    return cast("str", value) if is_word else json.dumps(value, separators=(",", ":"))


# --- the job


def _job_started(event: _Event) -> _Lines:
    size, backend = event.get("world_size"), event.get("backend")
    parts = [f"job {event['job_id']}"]
    parts += [counted(size, "worker")] if type(size) is int else []
    parts += [backend] if backend else []
    yield f"{', '.join(parts)}; launcher {_process_place(event)}"
    if words := script_words(_only_strings(event.get("argv"))):
        where = event.get("cwd")
        yield f"command: {shlex.join(words)}" + (f" (in {where})" if where else "")


def _process_place(event: _Event) -> str:
    return f"pid {event['pid']} on {event['host']}"


def _only_strings(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _composed(event: _Event) -> _Lines:
    nodes, workers = counted(event["nodes"], "node"), counted(event["world_size"], "worker")
    yield f"attempt {event['attempt']} has {nodes} with {workers}: {event['hosts']}"


def _attempt_started(event: _Event) -> _Lines:
    text = f"attempt {event['attempt']}"
    if (ranks := event.get("ranks")) is not None:
        text += f" of {name_ranks(_whole_numbers(ranks))}"
    text += f" on {event['host']}" if event.get("host") else ""
    address = ":".join(
        str(event[name]) for name in ("master_addr", "master_port") if event.get(name)
    )
    text += f"; master {'port ' if 'master_addr' not in event else ''}{address}" if address else ""
    coordinator = event.get("coordinator")
    yield text + (f"; coordinator {coordinator}" if coordinator else "")


def _workers_started(event: _Event) -> _Lines:
    pids = {rank: pid for key, pid in event["pids"].items() if (rank := read_rank(key)) is not None}
    if not pids:
        raise ValueError
    noun = "pid" if len(pids) == 1 else "pids"
    shown = ", ".join(str(pids[rank]) for rank in sorted(pids))
    verb = "runs" if len(pids) == 1 else "run"
    yield f"{name_ranks(pids)} {verb}" + (f" ({noun} {shown})" if len(pids) <= _MOST_PIDS else "")


def _worker_exited(event: _Event) -> _Lines:
    uptime = event.get("uptime_s")
    after = f" after {format_duration(uptime)}" if isinstance(uptime, (int, float)) else ""
    told = ", told to stop" if event.get("told_to_stop") is True else ""
    yield f"rank {event['rank']} {_ended_how(event['returncode'])}{after}{told}"


def _worker_exited_severity(event: _Event) -> Severity:
    is_bad = event["returncode"] != 0 and event.get("told_to_stop") is not True
    return Severity.BAD if is_bad else Severity.NORMAL


def _ended_how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by {signal_name(-code)}"


_REASONS = {
    "not_wanted": "",
    "would_repeat": "not restarted: it would repeat",
    "used_up": "all restarts are used up",
    "no_progress": "not restarted: the same failure came twice without progress",
    "hung": "not restarted after a hang",
    "no_node": "not restarted: no node is left",
    "processes_left": "not restarted: processes of the attempt are left",
    "coordinator_lost": "not restarted: the coordinator is lost",
    "stopped": "the job is being stopped",
}


def _failure(event: _Event) -> _Lines:
    found = event["diagnosis"]
    cause = read_failure(None, found["summary"], found)
    what = f"{cause.summary}: {cause.exception}" if cause.exception else cause.summary
    who = f"{name_ranks(cause.ranks)}: " if cause.ranks else ""
    yield f"attempt {event['attempt']} failed: {who}{what}"
    yield f"at {cause.frame}" if cause.frame else ""
    yield from _only_strings(found.get("others"))
    yield f"hint: {found['hint']}" if found.get("hint") else ""
    yield f"log: {found['log_path']}" if found.get("log_path") else ""
    if isinstance(reason := event.get("reason"), str):
        yield _REASONS.get(reason, reason)


def _restarting(event: _Event) -> _Lines:
    delay = event.get("delay_s")
    after = f" after {format_duration(delay)}" if delay else ""
    of = event.get("of")
    restarts = f" ({counted(of, 'restart')} allowed)" if type(of) is int else ""
    yield f"attempt {event['attempt']} follows{after}{restarts}"


def _signal(event: _Event) -> _Lines:
    yield f"the launcher got {event['signal']}"


def _leftovers_ended(event: _Event) -> _Lines:
    ended, killed = event["ended"], event["killed"]
    what = (
        "1 process that workers had left was"
        if ended == 1
        else f"{ended} processes that workers had left were"
    )
    yield f"{what} ended" + (f", {killed} by SIGKILL" if killed else "")
    processes = event.get("processes") or []
    for each in processes[:_MOST_PROCESSES]:
        rank = "" if each.get("rank") is None else f" of rank {each['rank']}"
        host = f" on {each['host']}" if each.get("host") else ""
        yield f"pid {each['pid']}{rank}{host}: {each.get('command')}"
    yield from _more_lines(len(processes) - _MOST_PROCESSES)


def _more_lines(count: int) -> _Lines:
    if count > 0:
        yield f"{count} more"


def _preload(event: _Event) -> _Lines:
    where = f" on {event['host']}" if event.get("host") else ""
    if event.get("problem"):
        yield f"workers start without preloading{where}: {event['problem']}"
        return
    names = ", ".join(_only_strings(event["modules"])) or "nothing"
    yield f"{names} imported in {format_duration(event['elapsed_s'])}{where}"
    left_out = event.get("left_out")
    yield f"left out: {', '.join(map(str, left_out))}" if left_out else ""


def _metrics_served(event: _Event) -> _Lines:
    yield f"metrics are at {event['url']}"


def _fault(event: _Event) -> _Lines:
    where = f" on {event['host']}" if event.get("host") else ""
    yield f"internal error{where}"
    yield from event["text"].splitlines()


def _job_ended(event: _Event) -> _Lines:
    yield f"the job has ended with exit code {event['exit_code']}"


def _job_ended_severity(event: _Event) -> Severity:
    return Severity.BAD if event["exit_code"] else Severity.GOOD


# --- nodes


def _node_joined(event: _Event) -> _Lines:
    yield f"node {event['host']} is connected" + (" again" if event.get("again") is True else "")


def _node_unreachable(event: _Event) -> _Lines:
    first, *more = event["text"].splitlines() or [""]
    again = "; it is tried again" if event.get("passing") is True else ""
    address = event.get("address")
    at = f" at {address}" if address and address != event["host"] else ""
    yield f"node {event['host']}{at} cannot be reached ({event['step']}): {first}{again}"
    yield from more


def _node_lost(event: _Event) -> _Lines:
    ranks = _whole_numbers(event.get("ranks"))
    who = f" ({name_ranks(ranks)})" if ranks else ""
    yield f"node {event['host']}{who} is lost: {event['why']}"


def _hosts_discovered(event: _Event) -> _Lines:
    parts = [
        f"{word} {_host_names(hosts)}"
        for word, hosts in (("new hosts:", event["came"]), ("hosts gone:", event["went"]))
        if hosts
    ]
    yield "; ".join(parts)


def _host_names(hosts: Sequence[Any]) -> str:
    return ", ".join([*map(str, hosts[:_MOST_HOSTS]), *_more_lines(len(hosts) - _MOST_HOSTS)])


def _reforming(event: _Event) -> _Lines:
    lost = counted(event["lost"], "lost node")
    yield f"attempt {event['attempt']} follows without {lost}"


def _taken_over(event: _Event) -> _Lines:
    yield (
        f"a new coordinator continues the job with attempt {event['attempt']}, after "
        f"{counted(event['restarts'], 'restart')}"
    )


# --- one launcher per node


def _coordinator_lost(event: _Event) -> _Lines:
    yield f"the coordinator is lost: {event['why']}"


def _calling_again(event: _Event) -> _Lines:
    yield f"this launcher connects to the coordinator again, after attempt {event['attempt']}"


def _rejoined(event: _Event) -> _Lines:
    yield f"the coordinator is there again, with job {event['job_id']}"


def _left(event: _Event) -> _Lines:
    yield f"this launcher has left the job: {event['why']}"


# --- progress and hangs


def _progress(event: _Event) -> _Lines:
    low, high = event.get("step_min"), event.get("step_max")
    parts = []
    if low is not None:
        parts.append(f"step {low:g}" if high in (None, low) else f"steps {low:g} to {high:g}")
    rate = event.get("steps_per_s")
    parts += [] if rate is None else [f"{rate:.3g} steps/s"]
    values = event.get("values")
    parts += [
        f"{name} {value:.6g}"
        for name, value in (values.items() if isinstance(values, dict) else ())
        if name != "step" and isinstance(value, (int, float))
    ]
    count = event["ranks"]
    parts.append(f"{counted(count, 'rank')} {'has' if count == 1 else 'have'} reported")
    yield ", ".join(parts)


def _checkpoint(event: _Event) -> _Lines:
    yield (
        f"rank {event['rank']} has written a checkpoint: step {event['step']:g}, "
        f"{format_size(event['bytes'])}, in {format_duration(event['seconds'])}"
    )


def _silence(event: _Event) -> _Lines:
    yield event["summary"]
    yield from _places(event)


def _places(event: _Event) -> _Lines:
    """Yield where the workers stand."""
    groups = event.get("groups") or []
    for group in groups[:_MOST_PROCESSES]:
        waits = f", in {group['waits_in']}" if group.get("waits_in") else ""
        where = group.get("frame") or group.get("kind")
        yield f"{name_ranks(_whole_numbers(group['ranks']))}{waits}: {where}"
    yield from _more_lines(
        max(0, len(groups) - _MOST_PROCESSES) + (event.get("groups_left_out") or 0)
    )


_ACTIVITIES = {
    "moved": "is at another line than before",
    "computes": "uses its processor",
    "children": "has processes that use a processor",
}


def _hang_postponed(event: _Event) -> _Lines:
    why = str(event.get("why"))
    yield (
        f"silent for {format_duration(event['silent_s'])}, but rank {event['rank']} "
        f"{_ACTIVITIES.get(why, why)}: the job goes on"
    )
    yield f"at {event['frame']}" if event.get("frame") else ""


_HANG_ACTIONS = {
    "stop": "the job is stopped",
    "restart": "the attempt is stopped",
    "report": "the job goes on",
}


def _hang(event: _Event) -> _Lines:
    silent_s = event.get("silent_s")
    missed = "no new step" if event.get("by_steps") is True else "no sign of life"
    length = f" for {format_duration(silent_s)}" if isinstance(silent_s, (int, float)) else ""
    yield f"{missed}{length}: {event['summary']}"
    yield from _places(event)
    yield f"hint: {event['hint']}" if event.get("hint") else ""
    yield _HANG_ACTIONS.get(str(event.get("action")), "")


def _whole_numbers(value: object) -> list[int]:
    return [each for each in value if type(each) is int] if isinstance(value, list) else []


def _always(severity: Severity) -> Callable[[_Event], Severity]:
    return lambda _: severity


_WARNING, _BAD = _always(Severity.WARNING), _always(Severity.BAD)
_KINDS: dict[str, _Kind] = {
    "job_started": _Kind(lines=_job_started),
    "composed": _Kind(lines=_composed),
    "attempt_started": _Kind(lines=_attempt_started),
    "workers_started": _Kind(lines=_workers_started),
    "worker_exited": _Kind(lines=_worker_exited, severity=_worker_exited_severity),
    "failure": _Kind(lines=_failure, severity=_BAD),
    "restarting": _Kind(lines=_restarting, severity=_WARNING),
    "signal": _Kind(lines=_signal, severity=_WARNING),
    "leftovers_ended": _Kind(lines=_leftovers_ended, severity=_WARNING),
    "preload": _Kind(lines=_preload),
    "metrics_served": _Kind(lines=_metrics_served),
    "fault": _Kind(lines=_fault, severity=_BAD),
    "job_ended": _Kind(lines=_job_ended, severity=_job_ended_severity),
    "node_joined": _Kind(lines=_node_joined),
    "node_unreachable": _Kind(lines=_node_unreachable, severity=_WARNING),
    "node_lost": _Kind(lines=_node_lost, severity=_BAD),
    "hosts_discovered": _Kind(lines=_hosts_discovered),
    "reforming": _Kind(lines=_reforming, severity=_WARNING),
    "taken_over": _Kind(lines=_taken_over, severity=_WARNING),
    "coordinator_lost": _Kind(lines=_coordinator_lost, severity=_BAD),
    "calling_again": _Kind(lines=_calling_again, severity=_WARNING),
    "rejoined": _Kind(lines=_rejoined),
    "left": _Kind(lines=_left, severity=_WARNING),
    "progress": _Kind(lines=_progress),
    "checkpoint": _Kind(lines=_checkpoint),
    "silence": _Kind(lines=_silence, severity=_WARNING),
    "hang_postponed": _Kind(lines=_hang_postponed, severity=_WARNING),
    "hang": _Kind(lines=_hang, severity=_BAD),
}
