"""Create the run directory of a job, find and lock such directories, and delete old ones.

The directory is private (0700). An existing directory is never overwritten: a new one gets the
suffix ``-2``, ``-3`` and so on. In the default and the temporary log directory, runs older than the
newest 50 are deleted, unless they may still be active (``RunDir.prune``).
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.run_files import (
    EVENTS,
    EVENTS_OF_NODE,
    MARKER,
    PID,
    REPORT,
    REPORT_DATA,
    is_output_folder,
    is_output_of_distlaunch,
)
from distlaunch.core.model.text import printable
from distlaunch.core.private_files import make_private_dir, make_private_dirs, open_private

KEPT = 50
LATEST = "latest"
_REGISTRY = "elsewhere"
_SILENT_S = 30 * 86400.0
"""A run of another host is considered ended if none of its files has changed for this long."""
_EVENT_BYTES = 1 << 16
_LOCK_TRIES, _LOCK_PAUSE_S = 20, 0.005
_SHARED_NAMES = 9
"""Number of predictable names that are tried in a temporary directory before a random name."""
_SAFE = "._-:+@=,"
_RUN_ID_BYTES = 90
_TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - tempfile has tried them, and the current directory
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def new_job_id(now: float, token: bytes) -> str:
    """Return an id that sorts by time: ``20261128-003012-1f9a2c``. ``token`` holds random bytes."""
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + "-" + token.hex()


def folder_name(run_id: str, token: bytes) -> str:
    """Return the name of a run's directory in torchrun's form, ``<run id>_<random>``.

    Characters of the user's run id that are unsafe in a file name are replaced.
    """
    safe = "".join(letter if letter.isalnum() or letter in _SAFE else "-" for letter in run_id)
    whole = os.fsencode(safe)[:_RUN_ID_BYTES].decode(errors="ignore")
    return f"{whole.lstrip('.-') or 'run'}_{token.hex()}"


def log_base(log_dir: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the parent of the run directories: --log-dir, or a default in the user's state
    directory.

    Return None if the user has no home directory.
    """
    if log_dir is not None:
        return os.path.abspath(log_dir)
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        home = environ.get("HOME") or os.path.expanduser("~")
        if not os.path.isabs(home):  # some containers have no HOME and no user entry
            return None
        state = os.path.join(home, ".local", "state")
    return os.path.join(state, "distlaunch", "jobs")


def registry_of(environ: Mapping[str, str]) -> str | None:
    """Return the directory with a link to each run directory that was made with --log-dir.

    Return None if the user has no home directory.
    """
    base = log_base(None, environ)
    return None if base is None else os.path.join(os.path.dirname(base), _REGISTRY)


def temporary_base(directory: str) -> str:
    """Return the log directory in a directory for temporary files.

    It is used if the default one cannot be written. Another user may have taken the name; then a
    number or a random ending is added.
    """
    return os.path.join(directory, f"distlaunch-jobs-{os.getuid()}")


class RunDir:
    """The directory of one job.

    The event file remains locked while the job runs, so that no other job deletes the directory.
    """

    def __init__(
        self,
        path: str,
        base: str,
        *,
        job_id: str,
        temporary: bool,
        pruned: bool,
        node: int | None = None,
        instead_of: str | None = None,
    ) -> None:
        """Use a directory, and lock it.

        ``node`` is the number of a joined launcher's node, None for the coordinator, whose
        directory must be new. A joined launcher may share the directory with the coordinator.
        Raises OSError.
        """
        self.path = path
        self.temporary = temporary
        self.instead_of = instead_of
        """For a temporary directory: the directory that cannot be written, and why; None if no
        directory was tried."""
        self.registry: str | None = None
        """The directory that has a link to this one, and to others made with --log-dir."""
        self._base = base
        self._pruned = pruned
        how = _NEW if node is None else _NEW & ~os.O_EXCL
        events = EVENTS if node is None else EVENTS_OF_NODE.format(node=node)
        self.events = open_private(os.path.join(path, events), how | os.O_APPEND)
        try:
            marker = open_private(os.path.join(path, MARKER), how)
        except OSError:
            os.close(self.events)
            raise
        try:
            if not os.fstat(marker).st_size:
                os.write(marker, os.fsencode(job_id))
        finally:
            os.close(marker)
        self._pid_file = os.path.join(path, PID) if node is None else None
        if self._pid_file is not None:
            with suppress(OSError):  # it is for the user alone, and the job runs without it
                pid_file = open_private(self._pid_file, _NEW)
                try:
                    os.write(pid_file, b"%d\n" % os.getpid())
                finally:
                    os.close(pid_file)
        _lock(self.events)

    def link_latest(self) -> None:
        """Point the link ``latest`` at this run, atomically. Errors are ignored."""
        link = os.path.join(self._base, LATEST)
        fresh = f"{link}.{os.urandom(6).hex()}"
        with suppress(OSError):
            if os.path.lexists(link) and not os.path.islink(link):
                return
            os.symlink(os.path.basename(self.path), fresh)
            try:
                os.replace(fresh, link)
            except OSError:
                os.unlink(fresh)

    def write_report(self, text: str) -> None:
        """Write ``report.txt``, without control characters. Errors are ignored."""
        self._replace(REPORT, printable(text, keep="\n"))

    def write_report_data(self, record: Mapping[str, object]) -> None:
        """Write ``report.json``. Errors are ignored."""
        self._replace(REPORT_DATA, json.dumps(record, indent=1) + "\n")

    def _replace(self, name: str, text: str) -> None:
        """Write a file. A file or link that a worker has put there is replaced and not opened."""
        fresh = os.path.join(self.path, f"{name}.new")
        with suppress(OSError):  # the console and the exit code still show it
            with open(
                open_private(fresh, _NEW), "w", encoding="utf-8", errors="backslashreplace"
            ) as file:
                file.write(text)
            os.replace(fresh, os.path.join(self.path, name))

    def prune(self) -> None:
        """Delete runs older than the newest 50 in the default or the temporary log directory.

        Only files with distlaunch's names are deleted, and directories that are then empty. The age
        of a run is the time of its last event. Runs that may still be active are not deleted, nor
        directories without distlaunch's marker file. The directory of --log-dir is never pruned:
        only links to directories that are gone are removed from the registry.
        """
        if self.registry is not None:
            _prune_registry(self.registry)
        if not self._pruned:
            return
        try:
            runs = [(_last_event(entry), entry.path) for entry in runs_in(self._base)]
        except OSError:
            return
        for _, path in sorted(runs, reverse=True)[KEPT:]:
            events = event_files(path)
            if (
                path != self.path
                and not any(map(is_locked, events))
                and not _may_run_elsewhere(path, events)
            ):
                remove_run(path)

    def close(self) -> None:
        """Release the lock on the run, and remove the file with the process id of this launcher."""
        if self._pid_file is not None:
            with suppress(OSError):
                os.unlink(self._pid_file)
            self._pid_file = None
        if self.events >= 0:
            os.close(self.events)
            self.events = -1


def _lock(descriptor: int) -> None:
    """Lock an event file, if that succeeds within 0.1 s.

    ``is_locked`` of another process may hold it for a moment. Without locks on this file system,
    pruning uses only the age.
    """
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_S)
        except OSError:
            return
        else:
            return


def runs_in(base: str) -> list[os.DirEntry[str]]:
    """Return the run directories in a log directory. Raises OSError."""
    return [
        entry
        for entry in os.scandir(base)
        if entry.is_dir(follow_symlinks=False) and os.path.isfile(os.path.join(entry.path, MARKER))
    ]


def _last_event(run: os.DirEntry[str]) -> float:
    """Return when the last event of a run was written. For a run without events, return when its
    directory changed."""
    times = [_modified_at(events) for events in event_files(run.path)]
    return max(times, default=0.0) or run.stat(follow_symlinks=False).st_mtime


def _modified_at(path: str) -> float:
    try:
        return os.stat(path, follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


def _may_run_elsewhere(run: str, events: Sequence[str]) -> bool:
    """Return whether a run may still be active on another host that shares this home directory.

    Locks of another host may not be visible on this host. A run is considered active if it has no
    end event, its events do not name this host, and one of its files has changed recently.
    """
    if not any(map(_is_open_elsewhere, events)):
        return False
    paths = (os.path.join(folder, name) for folder, _, names in os.walk(run) for name in names)
    return max(map(_modified_at, paths), default=0.0) > time.time() - _SILENT_S


def _is_open_elsewhere(events: str) -> bool:
    """Return whether an event file has no end event, and may be from another host."""
    try:
        descriptor = os.open(events, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        size = os.fstat(descriptor).st_size
        first = os.pread(descriptor, _EVENT_BYTES, 0).partition(b"\n")[0]
        last = os.pread(descriptor, _EVENT_BYTES, max(0, size - _EVENT_BYTES))
    except OSError:
        return False
    finally:
        os.close(descriptor)
    if not size or b'"type": "job_ended"' in last:
        return False
    try:
        record = json.loads(first)
    except (ValueError, RecursionError):
        return True
    return not isinstance(record, dict) or record.get("host") != os.uname().nodename


def remove_run(run: str) -> None:
    """Remove the files of a run directory, and the directory if nothing else is in it.

    Files with names that distlaunch does not give stay. Errors are ignored.
    """
    with suppress(OSError):
        for entry in list(os.scandir(run)):
            if entry.is_dir(follow_symlinks=False) and is_output_folder(entry.name):
                remove_run(entry.path)
            elif is_output_of_distlaunch(entry.name) and entry.name != MARKER:
                os.unlink(entry.path)
        if os.listdir(run) == [MARKER]:
            os.unlink(os.path.join(run, MARKER))
        os.rmdir(run)


def event_files(run: str) -> list[str]:
    """Return the event files in a run directory: the coordinator's, and the files of joined
    launchers."""
    first, last = EVENTS.split(".")
    try:
        names = os.listdir(run)
    except OSError:
        names = []
    return [
        os.path.join(run, name)
        for name in names
        if name.startswith(first) and name.endswith(f".{last}")
    ]


def is_locked(events: str) -> bool:
    """Return whether a running launcher holds the lock of an event file.

    An event file that cannot be opened counts as locked; a missing one, or one on a file system
    without locks, does not.
    """
    try:
        descriptor = os.open(events, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # this file system has no locks
    finally:
        os.close(descriptor)
    return False


def make_run_dir(
    log_dir: str | None,
    name: str,
    environ: Mapping[str, str],
    *,
    node: int | None = None,
    job_id: str | None = None,
) -> RunDir:
    """Create ``<log dir>/<name>`` with mode 0700. If the name exists, append ``-2``, ``-3`` and so
    on.

    ``job_id``: the id of the job if it differs from ``name``. If the default log directory cannot
    be written, a temporary one is used. Raises ConfigError if that cannot be written either, or the
    directory of --log-dir cannot.
    """
    base, job_id = log_base(log_dir, environ), job_id or name
    problems = []
    try:
        if base is not None:
            if log_dir is not None and not os.path.exists(os.path.dirname(base) or "."):
                os.makedirs(
                    os.path.dirname(base), exist_ok=True
                )  # with the umask, because other users may have to enter it
            path = _make_directory(base, name)
            if log_dir is None:
                _keep_others_out(base)
            with _removed_if_it_fails(path):
                made = RunDir(
                    path, base, job_id=job_id, temporary=False, pruned=log_dir is None, node=node
                )
            registry = None if log_dir is None else registry_of(environ)
            if registry is not None:
                _register(path, registry)
                made.registry = registry
            return made
    except OSError as exc:
        if log_dir is not None:
            raise ConfigError(
                f"{Opt.LOG_DIR(log_dir)}: {os.strerror(exc.errno or 0)}",
                hint="name a directory that you can write to",
            ) from exc
        problems.append(f"{printable(base or '')}: {os.strerror(exc.errno or 0)}")
    temporary, unusable = _temporary_directory(environ)
    if temporary is not None:
        base = temporary_base(temporary)
        try:
            base = _shared_base(base)
            path = _make_directory(base, name)
            with _removed_if_it_fails(path):
                return RunDir(
                    path,
                    base,
                    job_id=job_id,
                    temporary=True,
                    pruned=True,
                    node=node,
                    instead_of=problems[0] if problems else None,
                )
        except OSError as exc:
            unusable = [f"{printable(base)}: {os.strerror(exc.errno or 0)}"]
    why = "; ".join([*problems, *unusable])
    raise ConfigError(
        f"there is no place for log files: {why}", hint=f"name one with {Opt.LOG_DIR}"
    )


def _register(path: str, registry: str) -> None:
    """Link a run directory in the registry.

    Errors are ignored: only ``distlaunch ps`` misses the job then.
    """
    with suppress(OSError):
        make_private_dirs(registry)
        os.symlink(path, os.path.join(registry, f"{os.path.basename(path)}.{os.urandom(4).hex()}"))


def _prune_registry(registry: str) -> None:
    with suppress(OSError):
        for link in os.scandir(registry):
            if link.is_symlink() and not os.path.lexists(os.path.join(link.path, MARKER)):
                os.unlink(link.path)


@contextmanager
def _removed_if_it_fails(path: str) -> Iterator[None]:
    """Remove the new directory ``path`` if an OSError occurs in this context."""
    try:
        yield
    except OSError:
        remove_run(path)
        raise


def _temporary_directory(environ: Mapping[str, str]) -> tuple[str | None, list[str]]:
    """Return the directory for temporary files and an empty list.

    If no directory can be used, return None, and for each of the usual ones the reason.
    """
    import tempfile

    with suppress(FileNotFoundError):
        return tempfile.gettempdir(), []
    named = [environ[name] for name in ("TMPDIR", "TEMP", "TMP") if environ.get(name)]
    tried = dict.fromkeys([*named, *_TEMPORARY, os.getcwd()])
    return None, [f"{printable(each)}: {_why_unwritable(each)}" for each in tried]


def _why_unwritable(directory: str) -> str:
    """Return why no file can be written in this directory."""
    path = os.path.join(directory, f"distlaunch-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        descriptor = os.open(path, _NEW, 0o600)
        try:
            os.write(descriptor, b"\n")
        finally:
            os.close(descriptor)
            os.unlink(path)
    except OSError as exc:
        return os.strerror(exc.errno or 0)
    return "it was not writable a moment ago"


def join_run_dir(
    log_dir: str | None, folder: str, environ: Mapping[str, str], *, node: int, job_id: str
) -> RunDir:
    """Use the directory that the coordinator has created. If this node does not have it, create one
    with its name.

    A symbolic link is not followed, and the directory of another job is not used. Raises
    ConfigError if the directory of --log-dir cannot be written.
    """
    base = log_base(log_dir, environ)
    if base is not None:
        path = os.path.join(base, folder)
        with suppress(OSError):
            if _is_of(path, job_id):
                return RunDir(
                    path, base, job_id=job_id, temporary=False, pruned=log_dir is None, node=node
                )
    return make_run_dir(log_dir, folder, environ, node=node, job_id=job_id)


def _is_of(path: str, job_id: str) -> bool:
    """Return whether a path is a directory (not a link) that this user's distlaunch created for
    this job.

    Raises OSError if the path does not exist.
    """
    found = os.stat(path, follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return False
    marker = os.open(
        os.path.join(path, MARKER), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    )
    with open(marker, "rb") as file:
        expected = os.fsencode(job_id)
        return file.read(len(expected) + 1) == expected


def _keep_others_out(base: str) -> None:
    """Remove write permissions of other users from the state directory, which may have them because
    of a umask of 0."""
    for folder in (os.path.dirname(base), base):
        with suppress(OSError):
            found = os.stat(folder, follow_symlinks=False)
            if (
                stat.S_ISDIR(found.st_mode)
                and found.st_uid == os.getuid()
                and found.st_mode & 0o022
            ):
                os.chmod(folder, 0o700)


def _shared_base(first: str) -> str:
    """Return a private directory, created if needed, for use below ``/tmp`` or the like.

    If the name ``first`` is taken by another user, another name is used. Raises OSError if no
    directory can be created.
    """
    for base in (first, *(f"{first}-{number}" for number in range(2, _SHARED_NAMES + 1))):
        with suppress(FileExistsError):
            make_private_dir(base)
        found = os.stat(base, follow_symlinks=False)
        if (
            stat.S_ISDIR(found.st_mode)
            and found.st_uid == os.getuid()
            and not found.st_mode & 0o077
        ):
            return base
    base = f"{first}-{os.urandom(6).hex()}"
    make_private_dir(base)
    return base


def _make_directory(base: str, name: str) -> str:
    make_private_dirs(base)
    while True:
        path = free_path(base, name)
        with suppress(FileExistsError):
            make_private_dir(path)
            return path


def free_path(base: str, name: str) -> str:
    """Return the path of a run directory that does not exist: ``<base>/<name>``, else with ``-2``,
    ``-3`` and so on appended."""
    path, number = os.path.join(base, name), 1
    while os.path.lexists(path):
        number += 1
        path = os.path.join(base, f"{name}-{number}")
    return path
