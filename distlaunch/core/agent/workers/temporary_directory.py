"""Temporary directory of an agent. Created on first use, removed when the agent exits.

It has distlaunch's code for the workers' interpreters, if distlaunch runs from a zip, and the files
of a run directory that the node does not share. If the agent is killed, the spawner removes it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from distlaunch.core.agent.workers.streams import BOOT
from distlaunch.core.model.launcher_process import boot_id
from distlaunch.core.model.run_files import MARKER
from distlaunch.core.private_files import make_private_dir, make_private_dirs, open_private
from distlaunch.core.protocol import agent_messages as m

_BOOT_FILES = (
    "sitecustomize.py",
    "_distlaunch_warm.py",
    "_distlaunch_worker.py",
    "_distlaunch_groups.py",
)
_ELSEWHERE = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - the folder made there is new, and only we can enter it


class TemporaryDirectory:
    """The temporary directory. ``path`` is empty until the directory is created."""

    def __init__(self, environ: Mapping[str, str], elsewhere: Sequence[str] = _ELSEWHERE) -> None:
        self._environ = environ
        self._elsewhere = elsewhere
        self.path = ""
        self._lock = -1

    def boot(self) -> str:
        """Return the directory of distlaunch's code for the workers' interpreters. Create it if
        needed. Raises OSError."""
        if os.path.isdir(BOOT):
            return BOOT
        folder = os.path.join(self._ensure_created(), "boot")
        if not all(os.path.exists(os.path.join(folder, name)) for name in _BOOT_FILES):
            self._extract(folder)
        return folder

    def run_dir(self) -> str:
        """Return the replacement for the run directory. Create it if needed. Raises OSError."""
        folder = os.path.join(self._ensure_created(), "job")
        make_private_dirs(folder)
        return folder

    @staticmethod
    def _extract(folder: str) -> None:
        get_data = __loader__.get_data  # type: ignore[name-defined]  # that of zipimport, because we run from a zip
        make_private_dirs(folder)
        for name in _BOOT_FILES:
            path = os.path.join(folder, name)
            with open(
                open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC), "wb"
            ) as file:
                file.write(get_data(os.path.join(BOOT, name)))

    def _ensure_created(self) -> str:
        """Return the directory. Create and lock it in the first place where that succeeds; raise
        OSError if there is none."""
        if self.path and os.path.isdir(self.path):
            return self.path
        self._unlock()
        problem = OSError("there is no place for temporary files")
        for base in self._base_directories():
            path = os.path.join(base, f"{_name_of_boot()}{os.urandom(6).hex()}")
            new = os.path.join(base, f".distlaunch-{os.urandom(6).hex()}")
            lock = -1
            try:
                make_private_dir(new)
                lock = lock_folder(new)  # before it gets the name by which others find it
                os.rename(new, path)
                # a full disk is noticed now, while another base can be tried
                if not os.path.isdir(BOOT):
                    self._extract(os.path.join(path, "boot"))
            except OSError as exc:
                problem = exc
                remove_tree(new)
                remove_tree(path)
                if lock >= 0:
                    os.close(lock)
                continue
            self.path, self._lock = path, lock
            _remove_stale(base)
            return path
        raise problem

    def _base_directories(self) -> Iterator[str]:
        for base in (self._environ.get("TMPDIR", ""), *self._elsewhere):
            if os.path.isabs(base) and os.path.isdir(base):
                yield base

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """Remove the directory with its contents."""
        self._unlock()
        if self.path:
            remove_tree(self.path)
            self.path = ""


def lock_folder(path: str) -> int:
    """Place a shared lock on a directory. Return the descriptor, or -1 on failure.

    systemd-tmpfiles and later agents do not remove locked directories.
    """
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return -1
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return lock


def _name_of_boot() -> str:
    """Return the prefix of all agents' directory names until the machine restarts.

    Locks do not survive a restart, so a lock is meaningful only with this prefix.
    """
    boot = boot_id()
    return f"distlaunch-agent-{boot[:8]}-" if boot else "distlaunch-agent-"


def _remove_stale(base: str) -> None:
    """Remove unlocked directories of this user and this boot. Their agent and spawner were
    killed."""
    begin = _name_of_boot()
    if begin.endswith("agent-"):
        return
    with suppress(OSError):
        for name in os.listdir(base):
            if not name.startswith(begin):
                continue
            path = os.path.join(base, name)
            with suppress(OSError):
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    if os.fstat(lock).st_uid == os.getuid():
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        remove_tree(path)
                finally:
                    os.close(lock)


def remove_tree(path: str) -> None:
    """Remove a directory as far as possible. Symbolic links in it are not followed."""
    with suppress(OSError):
        os.chmod(path, 0o700)
    try:
        entries = list(os.scandir(path))
    except OSError:
        entries = []
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                remove_tree(entry.path)
            else:
                os.unlink(entry.path)
        except OSError:
            continue
    with suppress(OSError):
        os.rmdir(path)


def has_run_dir(path: str) -> bool:
    """Return whether the run directory with the launcher's marker exists here. May block on a file
    server."""
    return bool(path) and os.path.isfile(os.path.join(path, MARKER))


# --- adapt a start that comes from another machine


def adapt_start(start: m.Start, environ: Mapping[str, str], *, moved_to: str | None) -> m.Start:
    """Return an ``is_remote`` start message with this node's environment added. Variables in
    ``start`` win.

    ``moved_to`` replaces the run directory; None if this node has it.
    """
    from distlaunch.core.model.record import replace
    from distlaunch.core.model.variables import FLIGHT_RECORDER, without_outer_launchers

    own = {
        name: value
        for name, value in without_outer_launchers(environ).items()
        if not name.startswith("SSH_") and name not in _OF_THE_SHELL
    }
    env = {**own, **start.env, "PWD": start.cwd}
    run_dir = start.env.get("DISTLAUNCH_RUN_DIR", "")
    if moved_to is None or not run_dir:
        return replace(start, env=env)

    def moved(path: str) -> str:
        return (
            moved_to + path[len(run_dir) :]
            if path == run_dir or path.startswith(run_dir.rstrip("/") + "/")
            else path
        )

    workers = tuple(
        replace(
            spec,
            env={
                name: moved(value) if name == _ERROR_FILE else value
                for name, value in spec.env.items()
            },
            error_file=None if spec.error_file is None else moved(spec.error_file),
        )
        for spec in start.workers
    )
    # What torch would write to the run directory goes to its default place, where it stays.
    env = {
        name: value
        for name, value in env.items()
        if name not in FLIGHT_RECORDER or moved(value) == value
    }
    env["DISTLAUNCH_RUN_DIR"] = moved_to
    return replace(start, env=env, workers=workers, preload_log=moved(start.preload_log))


_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_OF_THE_SHELL = frozenset({"_", "OLDPWD", "SHLVL"})
