"""Stop a job from another shell, and wait for its end."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.launcher_process import LauncherProcess, is_suspended
from distlaunch.core.model.text import printable
from distlaunch.core.protocol.control_messages import ControlError
from distlaunch.jobs.control import NoControlError, ask
from distlaunch.jobs.events import POLL_S, is_stop_signal, read_events_but_old_progress
from distlaunch.jobs.job import Job, State, read_job

_KILLS_S = 10.0
"""How long a launcher that was asked to kill the workers may take before it gets signals."""
_AGAIN_S = 1.2
"""A second signal counts if it comes more than a second after the first."""
_SUSPENDED_S = 3.0
"""A launcher that is suspended for this long is reported."""


class JobGoneError(ConfigError):
    """The run directory of a job was removed while its end was waited for."""


def find_end(job: Job) -> Job | None:
    """Return what the run directory shows if the job has ended; None if it has not.

    Raises JobGoneError if the run directory was removed.
    """
    now = _read_again(job)
    return now if now.state.has_ended else None


def wait_for_end(job: Job, *, each: Callable[[], None] = lambda: None) -> Job:
    """Wait until a job has ended, and return what its run directory shows then.

    ``each`` is called several times a second, and once after the end. Raises ConfigError if the
    state of the job cannot be known here, and JobGoneError if its run directory is removed.
    """
    while True:
        now = _read_again(job)
        each()
        if now.state.has_ended:
            return now
        if now.state is State.UNKNOWN:
            raise elsewhere_error(now, "wait")
        time.sleep(POLL_S)


def _read_again(job: Job) -> Job:
    now = read_job(job.path)
    if now is None:
        raise JobGoneError(
            f"the run directory of job {printable(job.name)} is gone: {printable(job.path)}"
        )
    return now


def stop_job(
    job: Job,
    *,
    now: bool = False,
    each: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda _: None,
) -> Job:
    """Ask the launcher of a job to stop it, and wait for the end.

    The launcher gets SIGTERM and stops the workers: they get SIGTERM, too, and have the time of
    --grace. A job that is stopping already gets no further signal. With ``now`` the launcher is
    asked to kill the workers at once. A launcher that cannot be asked, or does not end, gets more
    signals, until it kills them. ``each`` is called several times a second. ``say`` is called once
    if the launcher is suspended.

    Returns what the run directory shows at the end. Raises ConfigError if the job has ended, or if
    its launcher cannot be signalled from here.
    """
    if job.state.has_ended:
        raise ConfigError(f"job {printable(job.name)} has ended already")
    if job.state is State.UNKNOWN or not job.is_here or job.launcher is None:
        raise elsewhere_error(job, "stop")
    launcher = job.launcher
    check = _SuspensionCheck(job, launcher, say)
    is_asked = now and _ask_to_kill(job)
    signals_from = time.monotonic() + _KILLS_S
    again: _RepeatedSignals | None = None
    if not is_asked and (now or not is_stopping(job)):
        again = _RepeatedSignals(job, launcher)

    def each_time() -> None:
        nonlocal again
        if again is not None and now:
            again()
        elif is_asked and time.monotonic() >= signals_from:
            again = _RepeatedSignals(job, launcher)
        check()
        each()

    return wait_for_end(job, each=each_time)


def is_stopping(job: Job) -> bool:
    """Return whether the launcher has got a signal that ends the job."""
    return any(map(is_stop_signal, read_events_but_old_progress(job.events)))


def _ask_to_kill(job: Job) -> bool:
    """Ask the launcher to kill the workers. Return whether it has accepted."""
    try:
        ask(job.path, "stop", now=True)
    except (NoControlError, ControlError):
        return False
    return True


class _SuspensionCheck:
    """Says once that the launcher has been suspended for some seconds."""

    def __init__(self, job: Job, process: LauncherProcess, say: Callable[[str], None]) -> None:
        self._job = job
        self._process = process
        self._say = say
        self._since: float | None = None
        self._is_said = False

    def __call__(self) -> None:
        if self._is_said or not (self._process.is_alive() and is_suspended(self._process.pid)):
            self._since = None
            return
        now = time.monotonic()
        if self._since is None:
            self._since = now
        elif now - self._since >= _SUSPENDED_S:
            self._is_said = True
            self._say(
                f"job {printable(self._job.name)}: its launcher (pid {self._process.pid}) is "
                f"suspended and does not answer; kill -CONT {self._process.pid} lets it go on"
            )


class _RepeatedSignals:
    """Sends SIGTERM at once, and further signals each time it is called, at most one in a while.

    Under Slurm a repeated SIGTERM does not count, because Slurm itself repeats it. So SIGINT and
    SIGTERM take turns.
    """

    def __init__(self, job: Job, process: LauncherProcess) -> None:
        self._job = job
        self._process = process
        self._numbers = cycle((signal.SIGINT, signal.SIGTERM))
        self._send(signal.SIGTERM)

    def __call__(self) -> None:
        """Send the next signal if it is time."""
        if time.monotonic() >= self._next:
            self._send(next(self._numbers))

    def _send(self, number: signal.Signals) -> None:
        self._next = time.monotonic() + _AGAIN_S
        _send_signal(self._job, self._process, number)


def _send_signal(job: Job, process: LauncherProcess, number: signal.Signals) -> None:
    """Send a signal to exactly this process. Nothing happens if it has ended.

    Raises ConfigError if it may not be signalled.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    except OSError:  # an old kernel
        descriptor = -1
    try:
        if not process.is_alive():
            return
        with suppress(ProcessLookupError):
            if descriptor >= 0:
                signal.pidfd_send_signal(descriptor, number)
            else:
                os.kill(process.pid, number)
    except PermissionError as exc:
        raise ConfigError(
            f"job {printable(job.name)}: its launcher (pid {process.pid}) may not be signalled",
            hint="it belongs to another user",
        ) from exc
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _command_on_host(job: Job) -> list[str]:
    launcher = job.launcher
    if launcher is None or not launcher.slurm_job:
        return ["ssh", job.host]
    # The steps of the job hold all its processors, hence --overlap.
    return [
        "srun",
        f"--jobid={launcher.slurm_job}",
        "--overlap",
        f"--nodelist={launcher.slurm_node}",
        "--ntasks=1",
    ]


def elsewhere_error(job: Job, command: str) -> ConfigError:
    """Return the error for a job whose launcher runs on another host.

    If the host is known, the hint is a shell command that runs ``command`` there.
    """
    host = printable(job.host) or "another host"
    words = shlex.join([*_command_on_host(job), "distlaunch", command, job.path])
    return ConfigError(
        f"the launcher of job {printable(job.name)} is on {host}, and this is {os.uname().nodename}",
        hint=words if job.host else None,
    )
