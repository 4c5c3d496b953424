"""Ask the launcher of a running job, or say where it can be asked."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.launcher_process import is_suspended
from distlaunch.core.model.text import printable
from distlaunch.core.protocol.control_messages import (
    ControlError,
    ControlRefusal,
    control_directories,
)
from distlaunch.jobs.control import NoControlError, NoSocketError, ask_at, connect
from distlaunch.jobs.events import read_events
from distlaunch.jobs.job import Job, State, read_job
from distlaunch.jobs.stop import elsewhere_error

_OPENS_S = 1.5
_AGAIN_S = 0.05


class JobEndedError(ConfigError):
    """The job does not run any more."""


class NotNowError(ConfigError):
    """The launcher cannot answer this request at this moment."""


def ask_running(job: Job, command: str, kind: str, *, timeout_s: float, **fields: object) -> Any:
    """Return the answer of a job's launcher to a request.

    ``command`` is the user's, for the line to use on another host. Raises JobEndedError if the job
    has ended, NotNowError if the launcher refuses, and ConfigError if it is elsewhere or does not
    answer.
    """
    if job.state.has_ended:
        raise ended_error(job)
    if job.launcher is None and (coordinator := _find_coordinator(job)) is not None:
        raise ConfigError(
            f"job {printable(job.name)}: the launcher here follows the coordinator, which answers"
            " for all nodes",
            hint=f"use distlaunch {command} on the host of {printable(coordinator)}",
        )
    if job.state is State.UNKNOWN or not job.is_here:
        raise elsewhere_error(job, command)
    try:
        with _connect(job) as connection:
            return ask_at(connection, kind, timeout_s=timeout_s, **fields)
    except NoControlError as exc:
        now = read_job(job.path)
        if now is None or now.state.has_ended:
            raise ended_error(now or job) from exc
        raise _no_answer_error(job, has_socket=not isinstance(exc, NoSocketError)) from exc
    except ControlError as exc:
        if exc.refusal is ControlRefusal.ENDING:
            raise ended_error(job) from exc
        if exc.refusal is ControlRefusal.UNKNOWN:
            raise NotNowError(
                f"job {printable(job.name)}: its launcher is of another release, which does not"
                " answer this",
                hint="use the release of distlaunch that has started the job",
            ) from exc
        raise NotNowError(f"job {printable(job.name)}: {exc.message}") from exc


@contextmanager
def refuse_odd_answers(job: Job) -> Iterator[None]:
    """Raise ConfigError if an answer, which may come from another release, lacks a field."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as exc:
        raise ConfigError(
            f"job {printable(job.name)}: its launcher gave an answer that this release cannot read",
            hint="use the release of distlaunch that has started the job",
        ) from exc


def _connect(job: Job) -> socket.socket:
    """Wait for the socket, which the launcher opens shortly after its start. Raises NoControlError."""
    until = time.monotonic() + _OPENS_S
    while True:
        try:
            return connect(job.path)
        except NoControlError:
            if time.monotonic() >= until:
                raise
        time.sleep(_AGAIN_S)


def ended_error(job: Job) -> JobEndedError:
    """Return the error for a job that does not run any more."""
    name = printable(job.name)
    how = "its launcher was killed" if job.state is State.KILLED else "it does not run any more"
    return JobEndedError(f"job {name}: {how}", hint=f"distlaunch status {name} shows how it ended")


def _no_answer_error(job: Job, *, has_socket: bool) -> ConfigError:
    if job.launcher is not None and is_suspended(job.launcher.pid):
        return ConfigError(
            f"job {printable(job.name)}: its launcher (pid {job.launcher.pid}) is suspended",
            hint=f"kill -CONT {job.launcher.pid} lets it go on",
        )
    if not has_socket:
        return ConfigError(
            f"job {printable(job.name)} has no control socket, so its launcher cannot be asked",
            hint=f"the launcher needs one of {' and '.join(control_directories())}, owned by you "
            "and with mode 0700",
        )
    pid = "" if job.launcher is None else f" (pid {job.launcher.pid})"
    return ConfigError(
        f"job {printable(job.name)}: its launcher{pid} does not answer",
        hint="is it suspended (Ctrl-Z, a debugger)?",
    )


def _find_coordinator(job: Job) -> str | None:
    found = None
    for event in read_events(job.events):
        match event:
            case {"type": "attempt_started", "coordinator": str(name)}:
                found = name
            case _:
                continue
    return found
