"""A job as its run directory shows it."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any

from distlaunch.coordinator.runtime.run_directory import LATEST, event_files, is_locked, remove_run
from distlaunch.core.model.launcher_process import (
    LauncherProcess,
    boot_id,
    process_from,
    process_of_pid_file,
)
from distlaunch.core.model.record import Record
from distlaunch.core.model.run_files import EVENTS, MARKER, PID

_BLOCK = 1 << 16
"""Read at each end of an event file."""
_LONGEST_ID = 4096
_LOCK_POLL_S = 0.05
_INT_CHARS = 20
"""A longer integer does not fit 64 bits."""
_SIGNALLED = 128
"""Larger exit codes are of processes that a signal ended."""


class State(Enum):
    """Whether a job runs. The values are those of ``--format json``."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    """It failed because the launcher got a signal."""
    KILLED = "killed"
    """The launcher is gone and has not written how the job ended."""
    UNKNOWN = "unknown"
    """The launcher is on another host, which cannot be asked."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing of the job is expected any more."""
        return self not in (State.RUNNING, State.UNKNOWN)


class Job(Record):
    """One job. Times are seconds since 1970."""

    path: str
    """Its run directory."""
    job_id: str
    state: State
    exit_code: int | None
    """The launcher's exit code; None if the job has not ended or was killed."""
    launcher: LauncherProcess | None
    """None if the event file does not name it."""
    host: str
    """The launcher's host, if it is known."""
    started: float | None
    """None if no event was written."""
    changed: float
    """When the last event was written."""
    world_size: int | None
    backend: str
    argv: tuple[str, ...]
    """The command of a worker."""
    cwd: str
    launchers: bool = False
    """Whether each node has a launcher, which writes the logs of its ranks."""
    node_logs: str = ""
    """The directory of --node-logs; empty without."""
    last_step: float | None = None
    """The lowest step of a rank in the last report of progress near the end of the event file."""
    log_bytes: int = 0
    """The size from which the middle of a log file is left out (--log-max-size); 0: none."""

    @property
    def name(self) -> str:
        """The name of the run directory, which is unique in its log directory."""
        return os.path.basename(self.path)

    @property
    def events(self) -> str:
        """The event file of the coordinator, or of the only launcher here."""
        return event_file(self.path)

    @property
    def is_here(self) -> bool:
        """Whether the launcher was started on this boot of this host."""
        here = (os.uname().nodename, boot_id())
        return self.launcher is not None and self.launcher.is_of(*here)


def event_file(path: str) -> str:
    """Return the coordinator's event file, else the first of another launcher."""
    whole = os.path.join(path, EVENTS)
    files = event_files(path)
    return whole if whole in files or not files else min(files)


def read_job(path: str) -> Job | None:
    """Return the job of a run directory, by the beginning and the end of its event file. Return
    None if the path is no run directory of this user."""
    job_id = read_marker(path)
    if job_id is None:
        return None
    events = event_file(path)
    first, last = _first_and_last_events(events)
    started = next((each for each in first if each.get("type") == "job_started"), {})
    ended = next((each for each in reversed(last) if each.get("type") == "job_ended"), None)
    launcher = process_from(started)
    if not first:  # a launcher runs on if its event file is removed
        launcher = process_of_pid_file(os.path.join(path, PID))
    code = None if ended is None else _typed(ended, "exit_code", int)
    host = _typed(started or (first[0] if first else {}), "host", str) or ""
    return Job(
        path=path,
        job_id=job_id,
        state=_ended_state(code, last)
        if code is not None
        else _state_without_end(events, launcher, host),
        exit_code=code,
        launcher=launcher,
        host=host,
        started=_typed(first[0], "time", float) if first else None,
        changed=_time_of_last_change(events, path),
        world_size=_typed(started, "world_size", int),
        backend=_typed(started, "backend", str) or "",
        argv=_words_or_empty(started.get("argv")),
        cwd=_typed(started, "cwd", str) or "",
        last_step=_last_step(last),
        log_bytes=_typed(started, "log_max_size", int) or 0,
        launchers=started.get("launchers") is True,
        node_logs=_typed(started, "node_logs", str) or "",
    )


def wait_for_launcher(job: Job, timeout_s: float) -> bool:
    """Wait until no launcher holds the lock of an event file. Return whether that is so in time.

    A launcher may run for a while after it has written how the job ended.
    """
    until = time.monotonic() + timeout_s
    while any(map(is_locked, event_files(job.path))):
        if time.monotonic() >= until:
            return False
        time.sleep(_LOCK_POLL_S)
    return True


def remove_job(job: Job) -> int:
    """Remove the run directory of a job, and the link ``latest`` to it. Return how many files of
    other programs stay."""
    remove_run(job.path)
    latest = os.path.join(os.path.dirname(job.path), LATEST)
    with suppress(OSError):
        if os.path.islink(latest) and not os.path.exists(latest):
            os.unlink(latest)
    return sum(name != MARKER for _, _, names in os.walk(job.path) for name in names)


def read_marker(path: str) -> str | None:
    """Return the job id in the marker of a run directory; the directory's name if the marker is
    empty.

    Return None if there is no marker, or the directory belongs to another user.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        if os.stat(path).st_uid != os.getuid():
            return None
        with open(os.open(os.path.join(path, MARKER), flags), "rb") as file:
            return os.fsdecode(file.read(_LONGEST_ID)) or os.path.basename(path)
    except OSError:
        return None


def _last_step(last: list[dict[str, Any]]) -> float | None:
    steps = (_typed(each, "step_min", float) for each in last if each["type"] == "progress")
    return next((step for step in reversed(list(steps)) if step is not None), None)


def _ended_state(code: int, last: list[dict[str, Any]]) -> State:
    if code > _SIGNALLED and any(event["type"] == "signal" for event in last):
        return State.STOPPED
    return State.FAILED if code else State.SUCCEEDED


def _state_without_end(events: str, launcher: LauncherProcess | None, host: str) -> State:
    if is_locked(events):
        return State.RUNNING
    here = os.uname().nodename
    if launcher is None:
        return State.UNKNOWN if host and host != here else State.KILLED
    if launcher.host != here:
        return State.UNKNOWN
    # File systems without locks show a running launcher by its process alone.
    runs = launcher.boot_id == boot_id() and launcher.is_alive()
    return State.RUNNING if runs else State.KILLED


def _time_of_last_change(events: str, path: str) -> float:
    for each in (events, path):
        try:
            return os.stat(each).st_mtime
        except OSError:
            continue
    return 0.0


def _first_and_last_events(events: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the first and the last events, as far as one block goes."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(events, flags)
    except OSError:
        return [], []
    try:
        size = os.fstat(descriptor).st_size
        first = os.pread(descriptor, _BLOCK, 0)
        last = os.pread(descriptor, _BLOCK, max(0, size - _BLOCK))
    except OSError:
        return [], []
    finally:
        os.close(descriptor)
    return parse_events(first.split(b"\n")), parse_events(last.split(b"\n"))


def parse_events(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the events in these lines, without those that are cut or no events.

    A number that is not finite, or does not fit 64 bits, is None.
    """
    found = []
    for line in lines:
        try:
            record = _decode(line.decode(errors="surrogatepass"))
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("type"), str):
            found.append(record)
    return found


def _bounded_int(text: str) -> int | None:
    if len(text) > _INT_CHARS:
        return None
    value = int(text)
    return value if -(1 << 63) <= value < 1 << 63 else None


def _finite_float(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


_decode = json.JSONDecoder(
    parse_int=_bounded_int, parse_float=_finite_float, parse_constant=lambda _: None
).decode


def _typed(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return a field of this type, else None: event files may have been edited or cut."""
    value = fields.get(name)
    if kind is float and type(value) is int:
        return float(value)
    return value if type(value) is kind else None


def _words_or_empty(value: Any) -> tuple[str, ...]:
    return tuple(value) if isinstance(value, list) and all(map(_is_text, value)) else ()


def _is_text(value: object) -> bool:
    return isinstance(value, str)
