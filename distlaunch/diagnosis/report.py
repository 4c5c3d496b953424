"""Format a diagnosis as the report at the end of the screen, and as data."""

from __future__ import annotations

from collections.abc import Sequence

from distlaunch.core.model.duration import format_duration
from distlaunch.core.model.text import name_ranks, printable
from distlaunch.diagnosis.clean_text import shorten_middle
from distlaunch.diagnosis.model import Cause, Diagnosis, FailedWait

_WIDTH = 100
_EXCEPTION_LINES = 7
_EXCERPT = 12


def render_report(
    diagnosis: Diagnosis,
    *,
    job_id: str,
    world_size: int,
    attempt: int,
    restarts: int,
    max_restarts: int,
    elapsed_s: float,
    run_dir: str | None,
    many_hosts: bool,
    filed: str | None = None,
    while_stopping: bool = False,
    terminal: bool = False,
) -> str:
    """Return the report: who failed and how, the exception and its frame, an excerpt, the other
    ranks, a hint, and the log.

    The report is plain text without control characters other than newlines, and ends with a
    newline.

    * ``attempt``: the number of the attempt, from 0.
    * ``restarts``: the number of restarts before the attempt. It is less than ``attempt`` if lost
      nodes were replaced.
    * ``filed``: a text that says where the first rank's log is, if the log exists but is not
      visible on this machine.
    * ``terminal``: the worker had the user's terminal, so its output includes the keys that were
      typed.
    """
    cause = diagnosis.cause
    host = f" on {cause.host}" if many_hosts and cause.host else ""
    first = (
        f" (rank {cause.ranks[0]} first)"
        if 1 < len(cause.ranks) < world_size and not cause.at_once
        else ""
    )
    when = _while_stopping(cause) if while_stopping else ""
    verb = "" if cause.awaited else f"failed{when}{first}: "
    place = _place_of_awaited(cause)
    lines = _wrapped(f"{_who(cause.ranks, world_size)}{host} {verb}{cause.summary}{place}", "")
    exception = (
        f"{cause.exception_type}: {cause.message or ''}".removesuffix(": ")
        if cause.exception_type
        else cause.message
    )
    if exception:
        told = "" if cause.told_by is None else f"{name_ranks((cause.told_by,))}: "
        lines += _wrapped(f"{told}{exception}", "  ", limit=_EXCEPTION_LINES - 2 * cause.awaited)
    if cause.frame and not place:
        lines += [f"  at {cause.frame}"]
    for other in (*cause.written, *diagnosis.failed_too):
        lines += _wrapped(other, "  ", limit=3)
    if cause.original:
        lines += _wrapped(f"original exception: {cause.original}", "  ", limit=_EXCEPTION_LINES)
    excerpt = [line for line in cause.excerpt if not _says_the_same(line, cause)]
    if excerpt:
        where = "the terminal, with what was typed" if terminal else cause.stream
        label = [f"  last lines on {where}:"] if cause.last_words else [""]
        if cause.awaited and cause.frame:
            label = [f"  where {name_ranks(cause.ranks[:1])} was:"]
        lines += [*label, *_shown_excerpt(excerpt), ""]
    for other in diagnosis.others:
        lines += _wrapped(other, "  ", limit=3)
    if diagnosis.hint:
        lines += _wrapped(f"hint: {diagnosis.hint}", "  ")
    if cause.log_path or run_dir:
        lines.append(f"  {_where_logs_are(cause, world_size, run_dir, filed)}")
    lines.append(
        job_line(
            job_id=job_id,
            attempt=attempt,
            restarts=restarts,
            max_restarts=max_restarts,
            elapsed_s=elapsed_s,
        )
    )
    return "\n".join(printable(line).rstrip() for line in lines) + "\n"


def killed_lines(ranks: Sequence[int], after_grace: str | None, leftovers: str | None) -> list[str]:
    """Return lines that name the killed workers and leftover processes, with the reason."""
    lines = []
    if ranks and after_grace is not None:
        lines += _wrapped(f"{name_ranks(ranks)} had to be killed, {after_grace}", "  ", limit=3)
    return lines + (_wrapped(leftovers, "  ", limit=3) if leftovers else [])


def job_line(
    *, job_id: str, attempt: int, restarts: int, max_restarts: int, elapsed_s: float
) -> str:
    """Return the last line of a report: the job, its duration, the number of its last attempt, and
    of restarts.

    Attempts are numbered from 0, like their directories and ``DISTLAUNCH_ATTEMPT``.
    """
    return (
        f"  job {job_id}, after "
        f"{format_duration(elapsed_s)}{attempt_and_restarts(attempt, restarts, max_restarts)}"
    )


def attempt_and_restarts(attempt: int, restarts: int, max_restarts: int) -> str:
    """Return ``, attempt 1 (restart 1 of 3)``; empty for the only attempt of a job without
    restarts."""
    if not attempt and not max_restarts:
        return ""
    return f", attempt {attempt}" + (f" (restart {restarts} of {max_restarts})" if restarts else "")


def failed_in_stop(diagnosis: Diagnosis, *, world_size: int, many_hosts: bool) -> str:
    """Return one line on the workers that failed while they were being stopped."""
    cause = diagnosis.cause
    host = f" on {cause.host}" if many_hosts and cause.host else ""
    return printable(
        f"{_who(cause.ranks, world_size)}{host} failed{_while_stopping(cause)}: {_what(cause)}"
    )


def _while_stopping(cause: Cause) -> str:
    return f" while {'they' if len(cause.ranks) > 1 else 'it'} stopped"


def _what(cause: Cause) -> str:
    named = cause.exception_type and not cause.awaited
    what = f"{cause.exception_type}: {cause.message}" if named else cause.summary
    return what[:160] + (f" ({cause.frame})" if cause.frame else "")


def one_line(diagnosis: Diagnosis, *, many_hosts: bool = False) -> str:
    """Return a cause as one line: the ranks, the error, and where it occurred."""
    cause = diagnosis.cause
    host = f" on {cause.host}" if many_hosts and cause.host else ""
    return f"{name_ranks(cause.ranks)}{host}: {_what(cause)}"


def diagnosis_record(diagnosis: Diagnosis) -> dict[str, object]:
    """Return the diagnosis as JSON-able data, for ``events.jsonl``."""
    cause = diagnosis.cause
    return {
        "ranks": list(cause.ranks),
        "host": cause.host,
        "returncode": cause.returncode,
        "exit_code": diagnosis.exit_code,
        "cause_seen": diagnosis.cause_seen,
        "summary": cause.summary,
        "exception_type": cause.exception_type,
        "message": cause.message,
        "original": cause.original,
        "frame": cause.frame,
        "excerpt": list(cause.excerpt),
        "last_words": cause.last_words,
        "stream": cause.stream,
        "awaited": cause.awaited,
        "wait": _wait_record(cause.wait),
        "told_by": cause.told_by,
        "written": list(cause.written),
        "failed_too": list(diagnosis.failed_too),
        "others": list(diagnosis.others),
        "hint": diagnosis.hint,
        "hint_kind": diagnosis.hint_kind,
        "repeats": diagnosis.repeats,
        "signature": list(diagnosis.signature) if diagnosis.signature else None,
        "log_path": cause.log_path,
    }


def _wait_record(wait: FailedWait | None) -> dict[str, object] | None:
    if wait is None:
        return None
    return {
        "kind": wait.kind.value,
        "mechanism": None if wait.mechanism is None else wait.mechanism.value,
        "ranks": list(wait.ranks),
        "call": wait.call,
        "timeout_s": wait.timeout_s,
        "sequence": wait.sequence,
        "last_sequence": wait.last_sequence,
        "joined": wait.joined,
        "expected": wait.expected,
        "key": wait.key,
    }


def _place_of_awaited(cause: Cause) -> str:
    """Return where the first awaited rank was, in parentheses. Return an empty text if it is not
    known."""
    if not cause.awaited or cause.frame is None:
        return ""
    return f" ({name_ranks(cause.ranks[:1])} was at {cause.frame})"


def _who(ranks: Sequence[int], world_size: int) -> str:
    if not ranks:
        return "no rank"
    if len(ranks) == world_size:
        return {1: "the only rank", 2: "both ranks"}.get(world_size, f"all {world_size} ranks")
    return f"{name_ranks(ranks)} of {world_size}"


def _where_logs_are(cause: Cause, world_size: int, run_dir: str | None, filed: str | None) -> str:
    """Return the path of the failed rank's log, or of all logs if every rank failed alike."""
    path = cause.log_path
    if path is None and filed is not None:
        return f"log: {filed}, if {name_ranks(cause.ranks[:1])} wrote any"
    if path is None:
        wrote = f" ({name_ranks(cause.ranks[:1])} wrote none)" if cause.ranks else ""
        return f"logs: {run_dir}{wrote}"
    folder, _, name = path.rpartition("/")
    if 1 < len(cause.ranks) == world_size and name == f"rank-{cause.ranks[0]}.log":
        return f"logs: {folder}/rank-*.log"
    return f"log: {path}"


def _says_the_same(line: str, cause: Cause) -> bool:
    """Return whether a line of the excerpt only repeats the exception."""
    if cause.exception_type is None:
        return line == cause.message
    return "Group" not in cause.exception_type and (line + ":").startswith(
        f"{cause.exception_type}:"
    )


def _shown_excerpt(excerpt: Sequence[str]) -> list[str]:
    """Return the last lines of the excerpt. A long last line is wrapped, others are shortened."""
    shown: list[str] = []
    for number, line in enumerate(excerpt[-_EXCERPT:], 1):
        if number == len(excerpt[-_EXCERPT:]) and len(line) > _WIDTH - 4:
            shown += _wrapped(line, "    ", limit=3)
        else:
            shown.append(shorten_middle(f"    {line}", _WIDTH))
    return shown


def _wrapped(text: str, indent: str, *, limit: int = 0) -> list[str]:
    """Return a text wrapped at the report's width, in at most ``limit`` lines (0: all)."""
    import textwrap

    further = indent + "  "
    lines = textwrap.wrap(
        printable(text),
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=further,
        break_on_hyphens=False,
    )
    if limit and len(lines) > limit:  # keep both ends of the text
        first = lines[: limit - limit // 2]
        first[-1] = first[-1][: _WIDTH - 4].rstrip() + " ..."
        lines = [*first, *lines[len(lines) - limit // 2 :]]
    return lines
