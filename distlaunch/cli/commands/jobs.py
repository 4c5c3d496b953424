"""``ps``, ``status``, ``logs``, ``events``, ``report``, ``top``, ``stack``, ``attach``, ``wait``,
``stop`` and ``rm``: jobs seen from another shell."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from distlaunch.cli.commands.jobs_options import JOB_OPTIONS
from distlaunch.cli.error_output import EXIT_INTERRUPTED, print_notice
from distlaunch.cli.option import convert
from distlaunch.cli.parser import scan
from distlaunch.console.escapes import clean_text
from distlaunch.console.prefixes import may_colour, read_ranks
from distlaunch.core.errors import ConfigError, UsageError
from distlaunch.core.model.record import Record
from distlaunch.core.model.run_files import STDOUT
from distlaunch.core.model.text import counted, name_ranks, near_choices, printable, quoted
from distlaunch.jobs.event_text import day_of, event_kinds, event_lines
from distlaunch.jobs.events import select_events
from distlaunch.jobs.find import find_job, find_jobs, newer_jobs
from distlaunch.jobs.job import Job, State, remove_job, wait_for_launcher
from distlaunch.jobs.show import describe_job, describe_stop, jobs_table, status_lines
from distlaunch.jobs.status import job_record, read_status
from distlaunch.jobs.stop import find_end, stop_job, wait_for_end
from distlaunch.jobs.worker_logs import (
    FindFiles,
    Line,
    LogFollower,
    attempts_of,
    last_lines,
    read_lines,
)

if TYPE_CHECKING:
    from distlaunch.jobs.remote_logs import RemoteLogs, UnreadLogs

EXIT_KILLED = 137
"""Exit code of ``wait`` for a job whose launcher was killed, as a shell has it for SIGKILL."""
_LAUNCHER_S = 2.0
"""A launcher usually exits within this time after its job has ended."""
_MOST_RANKS = 1_000_000
"""Limit for ranks of a job whose number of workers is not known."""
_MOST_JOBS = 10_000
_JOBS = {"ps": (0, 0), "report": (1, 2), "rm": (1, _MOST_JOBS)}
"""How many jobs a command takes, at least and at most; others take one."""
_SAME_OPTIONS = {"--lines": "--tail", "--ranks": "--rank"}
"""Options of other programs, and ours for the same."""
_COUNTS = ("no JOB", "one JOB", "two JOBs")


_REPORT_FORMATS = {
    ".html": "html",
    ".htm": "html",
    ".md": "md",
    ".markdown": "md",
    ".json": "json",
}
"""Formats of ``report`` by the suffix of its file."""
_PS_ANSWER_S = 0.2
"""How long each launcher may take for its answer to ``ps``."""


class _Request(Record):
    values: Mapping[str, Any]
    words: Sequence[str]
    """The jobs, as the user wrote them; empty for ``ps``."""
    environ: Mapping[str, str]

    def job(self) -> Job:
        """Return the first job. Raises UsageError if there is none."""
        return self.jobs()[0]

    def single_jobs(self, only: Callable[[Job], bool]) -> list[Job]:
        """Return the job that each word means alone, for a command that changes them.

        Jobs for which ``only`` is false do not count. A notice says which job another word than a
        name means. Raises UsageError if there is none.
        """
        found = [self._find_job(word, only) for word in self.words]
        for word, job in zip(self.words, found, strict=True):
            if word != job.name and os.sep not in word:
                print_notice(f"{printable(word)} is {describe_job(job, time.time())}")
        return found

    def jobs(self) -> list[Job]:
        """Return the jobs. Raises UsageError if there is none for a word."""
        return [self._find_job(word, None) for word in self.words]

    def _find_job(self, word: str, only: Callable[[Job], bool] | None) -> Job:
        log_dir = self.values.get("log_dir")
        job = find_job(word, log_dir, self.environ, only=only)
        newer = newer_jobs(job, log_dir, self.environ) if word == job.name else []
        if newer:
            names = ", ".join(printable(each.name) for each in newer)
            print_notice(f"this is job {printable(job.name)}; newer with its --job-id: {names}")
        return job

    @property
    def is_json(self) -> bool:
        return self.values.get("format") == "json"


def run_job_command(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run one of the commands of ``JOB_OPTIONS`` and return its exit code.

    Raises LaunchError and HelpRequested.
    """
    command, *words = argv
    request = parse_job_command(command, words, environ)
    return _COMMANDS[command](request)


def parse_job_command(command: str, words: Sequence[str], environ: Mapping[str, str]) -> _Request:
    """Parse the words of a command. Options may stand on both sides of the job.

    Raises UsageError or HelpRequested.
    """
    options = JOB_OPTIONS[command]
    given: dict[str, list[str]] = {}
    jobs: list[str] = []
    rest: Sequence[str] = words
    while rest:
        more, rest = scan(rest, options, unknown=_refuse_unknown)
        given |= more
        if rest:
            jobs.append(rest[0])
            rest = rest[1:]
    values = {
        option.field: convert(option, given[option.field][-1], option.name)
        if option.field in given
        else option.default
        for option in options
    }
    least, most = _JOBS.get(command, (1, 1))
    if len(jobs) < least:
        raise UsageError(
            f"distlaunch {command} needs a JOB",
            hint="the id of a job, its beginning, or latest; distlaunch ps --all lists your jobs",
        )
    if len(jobs) > most:
        raise UsageError(
            f"distlaunch {command} takes {_COUNTS[most]}, and got also {quoted(jobs[most])}",
            hint=f"distlaunch status {printable(jobs[0])}" if command == "ps" else None,
        )
    return _Request(values=values, words=jobs, environ=environ)


def _run_ps(request: _Request) -> int:
    jobs = find_jobs(request.values["log_dir"], request.environ)
    if not request.values["all"]:
        jobs = [job for job in jobs if not job.state.has_ended]
    if request.is_json:
        _print_json([job_record(job) for job in jobs])
        return 0
    if not jobs:
        print_notice(
            "no jobs were found"
            if request.values["all"]
            else "no job runs; distlaunch ps --all lists those that have ended"
        )
        return 0
    statuses = [read_status(job, timeout_s=_PS_ANSWER_S) for job in jobs if not job.state.has_ended]
    columns = os.get_terminal_size(STDOUT).columns if sys.stdout.isatty() else None
    by_path = {status.job.path: status for status in statuses}
    _print_lines(jobs_table(jobs, by_path, time.time(), columns=columns or None))
    return 0


def _run_status(request: _Request) -> int:
    status = read_status(request.job())
    if request.is_json:
        _print_json(status.record())
        return 0
    _print_lines(status_lines(status, time.time()))
    return 0


def _run_events(request: _Request) -> int:
    values = request.values
    kinds = _event_kinds(values["type"])
    job, follow = request.job(), values["follow"]
    events = select_events(
        job, kinds=kinds, since=_since(job, values["since"]), tail=values["tail"], follow=follow
    )
    if request.is_json:
        for event in events:
            _write_line(json.dumps(event).encode(), flush=follow)
        return 0
    colour = sys.stdout.isatty() and may_colour(request.environ)
    today = day_of(time.time())
    is_of_today = day_of(job.started) == today
    for event in events:
        with_date = not is_of_today or day_of(event.get("time")) != today
        lines = event_lines(event, with_date=with_date, colour=colour)
        _write_line("\n".join(lines).encode(errors="backslashreplace"), flush=follow)
    return 0


def _event_kinds(text: str | None) -> frozenset[str] | None:
    """Return the types of events that --type names. Raises UsageError if there is no such type."""
    if text is None:
        return None
    kinds = [part.strip().lower().replace("-", "_") for part in text.split(",")]
    known = event_kinds()
    for kind in kinds:
        if kind not in known:
            near = near_choices(kind, known, most=3)
            raise UsageError(
                f"--type {quoted(text)}: events have no type {quoted(kind)}",
                hint=f"near: {', '.join(near)}"
                if near
                else "distlaunch help event-log lists the types",
            )
    return frozenset(kinds)


def _since(job: Job, since_s: float | None) -> float | None:
    """Return the time in seconds since 1970 that --since means; None if it is not given.

    Of a job that has ended, --since counts from its last event.
    """
    if since_s is None:
        return None
    return (job.changed if job.state.has_ended else time.time()) - since_s


def _run_logs(request: _Request) -> int:
    job, values = request.job(), request.values
    ranks = _read_rank_option(job, values["rank"])
    keep = _line_filter(values["grep"])
    has_prefix = ranks is None or len(ranks) > 1
    follow = values["follow"]
    for_terminal = sys.stdout.isatty()
    unread: list[UnreadLogs] = []
    remote = _remote_logs(job, partial(_print_unread, job) if follow else unread.append)
    if remote is None and follow:
        _print_other_logs(job, values["attempt"], ranks)
    has_lines = False
    for line in _selected_lines(job, ranks, values, keep, remote):
        has_lines = True
        if request.is_json:
            record = {"rank": line.rank, "text": line.text.decode(errors="replace")}
            _write_line(json.dumps(record).encode(), flush=follow)
        else:
            prefix = f"[{line.rank}] ".encode() if has_prefix else b""
            _write_line(
                prefix + (clean_text(line.text) if for_terminal else line.text), flush=follow
            )
    sys.stdout.flush()
    for each in unread:
        _print_unread(job, each)
    if remote is None and not follow:
        _print_other_logs(job, values["attempt"], ranks)
    if not (has_lines or follow or unread or job.launchers or job.node_logs):
        _print_no_lines(job, ranks, values)
    return 0


def _print_no_lines(job: Job, ranks: frozenset[int] | None, values: Mapping[str, Any]) -> None:
    who = "all ranks" if ranks is None else name_ranks(ranks)
    known = attempts_of(job)
    shown = values["attempt"] if values["attempt"] is not None else (known[-1] if known else 0)
    which = any(values[each] is not None for each in ("grep", "since", "tail"))
    what = (
        "no line fits"
        if which
        else "no output so far"
        if job.state is State.RUNNING
        else "no output"
    )
    print_notice(f"job {printable(job.name)}, {who}, attempt {shown}: {what}")


def _remote_logs(job: Job, on_unread: Callable[[UnreadLogs], None]) -> RemoteLogs | None:
    """Return the logs of a running job on its nodes; None if its launcher cannot be asked here."""
    if not (job.launchers or job.node_logs) or job.state is not State.RUNNING or not job.is_here:
        return None
    from distlaunch.jobs.remote_logs import RemoteLogs

    return RemoteLogs(job, on_unread)


def _print_unread(job: Job, unread: UnreadLogs) -> None:
    from distlaunch.jobs.other_logs import other_logs_line
    from distlaunch.jobs.remote_logs import unread_line

    print_notice(unread_line(unread, other_logs_line(unread.logs, job)))


def _read_rank_option(job: Job, text: str | None) -> frozenset[int] | None:
    return None if text is None else read_ranks(text, "--rank", job.world_size or _MOST_RANKS)


def _print_other_logs(job: Job, attempt: int | None, ranks: frozenset[int] | None) -> None:
    """Print a notice for each host that has output which is not here."""
    if not job.launchers and not job.node_logs:
        return
    from distlaunch.jobs.other_logs import other_logs, other_logs_line

    known = attempts_of(job)
    shown = attempt if attempt is not None else (known[-1] if known else 0)
    for logs in other_logs(job, shown, ranks):
        print_notice(other_logs_line(logs, job))


def _selected_lines(
    job: Job,
    ranks: frozenset[int] | None,
    values: Mapping[str, Any],
    keep: Callable[[bytes], bool],
    remote: RemoteLogs | None,
) -> Iterator[Line]:
    attempt, follow = values["attempt"], values["follow"]
    known = attempts_of(job)
    if attempt is not None and attempt not in known and (not follow or job.state.has_ended):
        raise UsageError(
            f"job {printable(job.name)} has no output of attempt {attempt}",
            hint=f"attempts with output: {', '.join(map(str, known))}" if known else None,
        )
    find = None if remote is None else remote.find
    follower = LogFollower(job, ranks, attempt=attempt, find=find) if follow else None
    ends = None if follower is None else follower.ends
    shown = attempt if attempt is not None else (known[-1] if known else None)
    if shown is not None:
        yield from _lines_until(job, shown, ranks, values, keep, ends, find)
    if follower is not None:
        yield from (line for line in follower.lines() if keep(line.text))


def _lines_until(
    job: Job,
    attempt: int,
    ranks: frozenset[int] | None,
    values: Mapping[str, Any],
    keep: Callable[[bytes], bool],
    ends: Mapping[str, int] | None,
    find: FindFiles | None,
) -> Iterable[Line]:
    """Return the selected lines up to ``ends``, where a follower begins to read each file."""
    tail, since_s = values["tail"], values["since"]
    if tail is None and since_s is None and values["follow"]:
        return ()
    if tail is not None and since_s is None and values["grep"] is None:
        return last_lines(job, attempt, ranks, tail, ends=ends, find=find)
    since = _since(job, since_s)
    written = read_lines(job, attempt, ranks, since=since, ends=ends, find=find)
    lines = (line for line in written if keep(line.text))
    return lines if tail is None else deque(lines, maxlen=tail)


def _line_filter(pattern: str | None) -> Callable[[bytes], bool]:
    if pattern is None:
        return lambda _: True
    try:
        found = re.compile(os.fsencode(pattern))
    except re.error as exc:
        raise UsageError(f"--grep {quoted(pattern)} is no regular expression: {exc}") from exc
    return lambda text: found.search(text) is not None


def _run_top(request: _Request) -> int:
    from distlaunch.cli.commands.top import run_top

    values = request.values
    return run_top(
        request.job(),
        once=values["once"],
        as_json=request.is_json,
        interval_s=values["interval"],
    )


def _run_stack(request: _Request) -> int:
    from distlaunch.jobs.stacks import read_stacks

    job = request.job()
    ranks = _read_rank_option(job, request.values["rank"])
    found = read_stacks(job, ranks, command="stack", native=request.values["native"])
    if request.is_json:
        _print_json(found.record)
    else:
        _print_lines(found.text.splitlines())
    return 0


def _run_report(request: _Request) -> int:
    from distlaunch.jobs.report.job_report import build_report, report_record
    from distlaunch.jobs.report.write_report import write_file

    output = request.values["output"]
    form = _report_format(request.values["format"], output)
    reports = [build_report(job) for job in request.jobs()]
    if form == "json":
        records = [report_record(report) for report in reports]
        text = json.dumps(records[0] if len(records) == 1 else records, indent=1) + "\n"
    elif form == "md":
        from distlaunch.jobs.report.report_text import comparison_markdown, markdown_of

        text = markdown_of(reports[0]) if len(reports) == 1 else comparison_markdown(*reports)
    else:
        from distlaunch.jobs.report.report_page import comparison_page, page_of

        text = page_of(reports[0]) if len(reports) == 1 else comparison_page(*reports)
        names = "-".join(report.job.name for report in reports)
        output = output or f"distlaunch-{names}.html"
    if output in (None, "-"):
        _write_line(text.rstrip("\n").encode(errors="backslashreplace"))
        return 0
    write_file(output, text)
    print_notice(f"wrote {printable(output)}")
    return 0


def _report_format(given: str | None, output: str | None) -> str:
    """Return the format of a report. Raises UsageError if the file is named as another format."""
    suffix = os.path.splitext(output or "")[1].lower()
    named = _REPORT_FORMATS.get(suffix)
    if given is not None and named not in (None, given):
        raise UsageError(
            f"--format {given} does not fit --output {quoted(output or '')}: {suffix} is {named}",
            hint="leave out --format, or name the file otherwise",
        )
    if given is None and named is None and suffix:
        raise UsageError(
            f"--output {quoted(output or '')}: no format has the suffix {printable(suffix)}",
            hint="name the file .html, .md or .json, or give --format",
        )
    return given or named or "html"


def _run_wait(request: _Request) -> int:
    job = request.job()
    with _terminable_until_end(job):
        return _report_end(wait_for_end(job))


def _run_attach(request: _Request) -> int:
    from distlaunch.cli.commands.attach import attach

    ended = attach(request.job())
    if ended is None:
        return 0
    print_notice(f"job {printable(ended.name)} has ended: {_describe_end(ended)}")
    return EXIT_KILLED if ended.exit_code is None else ended.exit_code


@contextmanager
def _terminable_until_end(job: Job) -> Iterator[None]:
    """Ignore SIGTERM from the end of the job on, until this process has ended.

    A step of Slurm in the allocation of the job gets SIGTERM when the batch script ends, and that
    is at once after the job.
    """
    has_ended = False

    def on_term(number: int, _frame: object) -> None:
        with suppress(ConfigError):
            if has_ended or find_end(job) is not None:
                return
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, on_term)
    try:
        yield
        with suppress(ConfigError):
            has_ended = find_end(job) is not None
    finally:
        if not has_ended:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run_stop(request: _Request) -> int:
    [job] = request.single_jobs(lambda job: not job.state.has_ended)
    with _terminable_until_end(job):
        return _stop_one(job, now=request.values["now"])


def _stop_one(job: Job, *, now: bool) -> int:
    name = printable(job.name)
    try:
        if not now and (stopping := describe_stop(read_status(job), time.time())):
            print_notice(f"job {name} is {stopping} already; --now kills its workers")
        ended = stop_job(job, now=now, say=print_notice)
    except KeyboardInterrupt:
        print_notice(
            f"job {name} goes on stopping; distlaunch wait {name} waits for its end, "
            f"distlaunch stop {name} --now kills its workers"
        )
        return EXIT_INTERRUPTED
    status = read_status(ended)
    killed, saved = status.killed, status.checkpoint
    more = (
        f"; {counted(killed, 'worker')} {'was' if killed == 1 else 'were'} killed" if killed else ""
    )
    if saved is not None:
        more += f"; last checkpoint: step {saved.step:g}"
    print_notice(f"job {name} has ended: {_describe_end(ended)}{more}")
    if not wait_for_launcher(ended, _LAUNCHER_S):
        print_notice(f"{_launcher_of(ended)} still runs, for example a command of --on-event")
    return 0


def _run_rm(request: _Request) -> int:
    jobs = request.single_jobs(lambda job: job.state.has_ended)
    for job in jobs:
        _check_ended(job)
    for job in jobs:
        left = remove_job(job)
        if left:
            print_notice(
                f"{counted(left, 'file')} not written by distlaunch: kept in {printable(job.path)}"
            )
    return 0


def _check_ended(job: Job) -> None:
    """Raise ConfigError if a job has not ended, or its launcher does not exit in time."""
    if not job.state.has_ended:
        raise ConfigError(
            f"job {printable(job.name)} has not ended",
            hint=f"distlaunch stop {printable(job.name)}"
            if job.state is State.RUNNING
            else f"its launcher is on {printable(job.host)}",
        )
    if not wait_for_launcher(job, _LAUNCHER_S):
        raise ConfigError(
            f"job {printable(job.name)} has ended, but {_launcher_of(job)} still runs",
            hint="it may wait for a command of --on-event; try again when it has exited",
        )


def _launcher_of(job: Job) -> str:
    return "its launcher" if job.launcher is None else f"its launcher (pid {job.launcher.pid})"


def _report_end(job: Job) -> int:
    if job.exit_code is not None:
        return job.exit_code
    print_notice(f"job {printable(job.name)}: {_describe_end(job)}")
    return EXIT_KILLED


def _describe_end(job: Job) -> str:
    if job.exit_code is None:
        return "its launcher was killed, or its host was restarted"
    return f"exit code {job.exit_code}"


def _print_json(value: object) -> None:
    _write_line(json.dumps(value, indent=2).encode())


def _print_lines(lines: Iterable[str]) -> None:
    _write_line("\n".join(lines).encode(errors="backslashreplace"))


def _write_line(line: bytes, *, flush: bool = False) -> None:
    sys.stdout.buffer.write(line + b"\n")
    if flush:
        sys.stdout.buffer.flush()


def _refuse_unknown(
    flag: str,
    word: str,
    by_flag: Iterable[str],
    given: Mapping[str, Sequence[str]],
    rest: Sequence[str],
) -> NoReturn:
    del word, given, rest
    from difflib import get_close_matches

    flags = list(by_flag)
    same = _SAME_OPTIONS.get(flag)
    near = [same] if same in flags else get_close_matches(flag, flags, n=1)
    raise UsageError(
        f"unknown option {quoted(flag)}",
        hint=f"did you mean {near[0]}?" if near else f"options: {', '.join(flags)}",
    )


_COMMANDS: dict[str, Callable[[_Request], int]] = {
    "ps": _run_ps,
    "status": _run_status,
    "logs": _run_logs,
    "events": _run_events,
    "top": _run_top,
    "stack": _run_stack,
    "attach": _run_attach,
    "report": _run_report,
    "wait": _run_wait,
    "stop": _run_stop,
    "rm": _run_rm,
}
