"""Layer job: the run directory: made once, private, never overwriting; the newest are kept."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from distlaunch.core.errors import ConfigError

KEPT = 50
EVENTS = "events.jsonl"
REPORT = "report.txt"
_LATEST = "latest"


def new_job_id(now: float, token: bytes) -> str:
    """Make an id that sorts by time: ``20261128-003012-1f9a2c``; ``token`` holds random bytes."""
    import time

    return time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + "-" + token.hex()


def default_log_dir(environ: dict[str, str]) -> str:
    """Name where run directories go when --log-dir does not say."""
    state = environ.get("XDG_STATE_HOME")
    if not state or not os.path.isabs(state):
        state = os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "distlaunch", "jobs")


class RunDir:
    """The folder of one job. Its event file stays locked while the job runs, so that none prunes it."""

    def __init__(self, path: str, base: str, *, temporary: bool) -> None:
        self.path = path
        self.temporary = temporary
        self._base = base
        self.events = os.open(
            os.path.join(path, EVENTS), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        with suppress(OSError):  # a file system without locks: pruning goes by age alone there
            fcntl.flock(self.events, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def link_latest(self) -> None:
        """Point ``latest`` at this run; best effort, atomically."""
        link = os.path.join(self._base, _LATEST)
        fresh = f"{link}.{os.getpid()}"
        with suppress(OSError):
            if os.path.lexists(link) and not os.path.islink(link):
                return
            os.symlink(os.path.basename(self.path), fresh)
            os.replace(fresh, link)

    def prune(self) -> None:
        """Remove the oldest runs beyond the newest 50; what does not look like a run, or still runs, stays."""
        runs = []
        try:
            for entry in os.scandir(self._base):
                events = os.path.join(entry.path, EVENTS)
                if entry.is_dir(follow_symlinks=False) and os.path.isfile(events):
                    runs.append((entry.stat(follow_symlinks=False).st_mtime, entry.path, events))
        except OSError:
            return
        for _, path, events in sorted(runs, reverse=True)[KEPT:]:
            if path != self.path and not _in_use(events):
                import shutil

                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Release the event file."""
        if self.events >= 0:
            os.close(self.events)
            self.events = -1


def _in_use(events: str) -> bool:
    try:
        descriptor = os.open(events, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def make_run_dir(log_dir: str | None, job_id: str, environ: dict[str, str]) -> RunDir:
    """Make ``<log dir>/<job id>``, 0700. An id that exists gets ``-2``, ``-3`` …: nothing is overwritten.

    Raises ConfigError if an explicit directory cannot be written; the default one falls back to a temporary one.
    """
    base = os.path.abspath(log_dir) if log_dir is not None else default_log_dir(environ)
    try:
        return RunDir(_make(base, job_id), base, temporary=False)
    except OSError as exc:
        if log_dir is not None:
            raise ConfigError(
                f"--log-dir {log_dir}: {os.strerror(exc.errno or 0)}", hint="name a directory that you can write to"
            ) from exc
    import tempfile

    base = os.path.join(tempfile.gettempdir(), f"distlaunch-jobs-{os.getuid()}")
    try:
        return RunDir(_make(base, job_id), base, temporary=True)
    except OSError as exc:
        raise ConfigError(f"no place for logs: {base}: {os.strerror(exc.errno or 0)}", hint="use --log-dir") from exc


def _make(base: str, job_id: str) -> str:
    os.makedirs(base, mode=0o700, exist_ok=True)
    if os.stat(base).st_uid not in (os.getuid(), 0) and base.startswith("/tmp/"):  # noqa: S108 - someone else's trap
        raise PermissionError(13, "belongs to another user")
    number = 1
    while True:
        path = os.path.join(base, job_id if number == 1 else f"{job_id}-{number}")
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            number += 1
        else:
            return path
