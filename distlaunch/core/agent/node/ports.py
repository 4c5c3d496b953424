"""Reserve a TCP port for rank 0's store, so that no other process takes it before rank 0.

A reserved port is bound exclusively to the dual-stack wildcard address, without listening. Just
before rank 0 starts, SO_REUSEADDR is set on the reserving socket. Rank 0's server sets the flag
too, so it can bind the port and listen; servers without the flag cannot.

For the reachability test a second socket listens on the port. The reserving socket cannot: to stop
listening it would need shutdown, which frees a port that the kernel has chosen.

A lock file names the job that has reserved a port, because the kernel does not list sockets that
are bound and do not listen. The directory is locked while a job locks its file and writes its name,
so that no other job reads an old name or none.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.text import printable
from distlaunch.core.private_files import make_private_dir, open_private
from distlaunch.core.probe.files import read_text

_TIME_WAIT, _LISTEN, _ESTABLISHED = "06", "0A", "01"  # states in /proc/net/tcp
_BACKLOG = 4096
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TURN_S, _STEP_S = 1.0, 0.001
"""How long, and how often, to wait for another job that takes a lock, which needs microseconds."""


_FIRST_LOOK_S = 0.5


class PortUse:
    """Finds out whether a process uses a port, by reading the kernel's tables at growing intervals.

    A torch store listens as long as its process group exists, so few checks are enough. Times are
    on the caller's clock.
    """

    def __init__(self, number: int, now: float) -> None:
        self._number = number
        self._step_s = _FIRST_LOOK_S
        self._due = now + _FIRST_LOOK_S
        self.is_used = False

    def deadline(self) -> float | None:
        """Return when the next check is due; None once a process has used the port."""
        return None if self.is_used else self._due

    def tick(self, now: float) -> None:
        """Check the port, if a check is due. The time to the next check is doubled."""
        if not self.is_used and now >= self._due:
            self._step_s *= 2
            self._due = now + self._step_s
            states = {state for state, _ in _sockets(self._number)}
            self.is_used = not states.isdisjoint((_LISTEN, _ESTABLISHED))

    def finish(self) -> bool:
        """Check once more after the workers have ended. Return whether a process has ever used the
        port.

        Closed connections remain visible for a minute.
        """
        self.is_used = self.is_used or bool(_sockets(self._number, either_end=True))
        return self.is_used


class HeldPort:
    """A port on which no other process can listen until ``release``."""

    def __init__(self, held: socket.socket, lock: int | None) -> None:
        self._held = held
        self._lock = lock
        self.number: int = held.getsockname()[1]

    def listener(self) -> socket.socket:
        """Return a non-blocking socket that listens on the port. Closing it keeps the port
        reserved. Raises OSError."""
        listening = socket.socket(self._held.family, socket.SOCK_STREAM)
        try:
            listening.setblocking(False)  # noqa: FBT003 - the standard library's signature
            if self._held.family == socket.AF_INET6:
                with suppress(OSError):
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            # With the flag on both sockets, this one may bind the port of the other, and
            # connections in TIME_WAIT have the flag, too.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.share()
            try:
                listening.bind(self._held.getsockname()[:2])
                listening.listen(_BACKLOG)
            finally:
                self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except OSError:
            listening.close()
            raise
        return listening

    def share(self) -> None:
        """Allow servers that set SO_REUSEADDR to bind the port."""
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def release(self) -> None:
        """Release the port."""
        if self._lock is not None:
            _remove_lock(self._lock, self.number)
            os.close(self._lock)
            self._lock = None
        self._held.close()


def hold_port(
    number: int,
    *,
    owner: str,
    pause: Callable[[float], None] = time.sleep,
    bind: Callable[[int], socket.socket] | None = None,
) -> HeldPort:
    """Return a reserved port; ``number`` 0 means any free one.

    ``owner`` is this job's id, which other jobs that need the port print. ``pause`` sleeps for some
    seconds while another job changes a lock. Raises ConfigError if no port can be reserved, with
    the process or job that uses it.
    """
    lock = _lock_port(number, owner, pause) if number else None
    try:
        return HeldPort((bind or _bind_exclusively)(number), lock)
    except OSError as exc:
        if lock is not None:
            _remove_lock(lock, number)
            os.close(lock)
        raise _refused_error(number, exc) from exc


def _bind_exclusively(number: int) -> socket.socket:
    """Bind a socket to a port exclusively, without listening. Raise OSError."""
    try:
        held = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        with suppress(OSError):
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        address = "::"
    except OSError:  # a kernel without IPv6
        held, address = socket.socket(socket.AF_INET, socket.SOCK_STREAM), "0.0.0.0"  # noqa: S104 - bound, not listening
    try:
        held.bind((address, number))
    except OSError as exc:
        if exc.errno == errno.EADDRNOTAVAIL and address == "::":  # IPv6 switched off at run time
            held.close()
            held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            held.bind(("0.0.0.0", number))  # noqa: S104 - bound, not listening
            return held
        if exc.errno != errno.EADDRINUSE or not _only_time_wait(number):
            held.close()
            raise
        # The port has only connections in TIME_WAIT, so a server with SO_REUSEADDR may bind it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((address, number))
        except OSError:
            held.close()
            raise
        held.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 0
        )  # exclusive again, until ``share``
    return held


def _lock_directory() -> str:
    """Return the directory of lock files, to which only this user can write. Raises OSError."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if not os.path.isabs(base) or not os.path.isdir(base):
        base = "/tmp"  # noqa: S108 - what is made there is checked below
    directory = os.path.join(base, f"distlaunch-{os.getuid()}")
    with suppress(FileExistsError):
        make_private_dir(directory)
    found = os.stat(directory, follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "not ours alone")
    return directory


def _lock_port(number: int, owner: str, pause: Callable[[float], None]) -> int | None:
    """Lock a port against this user's other jobs. Raises ConfigError if one of them has it.

    Return None if there can be no lock. Without it, other jobs cannot find out who has the port.
    """
    try:
        directory = _lock_directory()
        path = os.path.join(directory, f"port-{number}")
        lock = open_private(path, _LOCK_FLAGS)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            raise OSError(errno.EINVAL, "not a plain file")  # noqa: TRY301 - handled as all that goes wrong here
        with _in_turn(directory, pause):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _held_error(number, os.read(lock, 200)) from None
            if not _is_at(path, lock):  # its job has released the port and removed the file
                os.close(lock)
                lock = open_private(path, _LOCK_FLAGS)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.write(lock, f"{owner} (pid {os.getpid()})".encode())
            _remove_stale(directory, but=path)
    except ConfigError:
        os.close(lock)
        raise
    except OSError:
        os.close(lock)
        return None
    return lock


def _is_at(path: str, lock: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(lock))
    except FileNotFoundError:
        return False


def _remove_lock(lock: int, number: int) -> None:
    with suppress(OSError):
        path = os.path.join(_lock_directory(), f"port-{number}")
        if _is_at(path, lock):
            os.unlink(path)


def _remove_stale(directory: str, *, but: str) -> None:
    """Remove lock files of killed jobs, which are not locked."""
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if path == but or not (name.startswith("port-") and name[5:].isdecimal()):
            continue
        with suppress(OSError):
            lock = os.open(path, _LOCK_FLAGS & ~os.O_CREAT)
            try:
                if stat.S_ISREG(os.fstat(lock).st_mode):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
            finally:
                os.close(lock)


@contextmanager
def _in_turn(directory: str, pause: Callable[[float], None]) -> Iterator[None]:
    """Wait until no other job changes a lock, at most ``_TURN_S``. Raises OSError."""
    turn = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(round(_TURN_S / _STEP_S)):
            try:
                fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pause(_STEP_S)
            except OSError:  # the file system cannot lock directories
                break
            else:
                break
        yield
    finally:
        os.close(turn)


def _held_error(number: int, name: bytes) -> ConfigError:
    other = printable(name.decode(errors="replace").strip())
    by = f"distlaunch job {other}" if other else "another job of distlaunch"
    return ConfigError(f"port {number} is held by {by}")


def _refused_error(number: int, exc: OSError) -> ConfigError:
    if not number:
        why = "all are in use" if exc.errno == errno.EADDRINUSE else os.strerror(exc.errno or 0)
        hint = (
            "ss -s counts sockets, and sysctl net.ipv4.ip_local_port_range says how many ports "
            "there are"
        )
        return ConfigError(f"no free port can be held: {why}", hint=hint)
    if exc.errno == errno.EACCES:
        return ConfigError(
            f"port {number} needs privileges that this user lacks", hint="take one above 1023"
        )
    if exc.errno == errno.EADDRINUSE:
        holder = _listening_process(number)
        by = f" by {holder}" if holder else ""
        return ConfigError(f"port {number} is in use{by}")
    return ConfigError(f"port {number} cannot be held: {os.strerror(exc.errno or 0)}")


def _sockets(number: int, *, either_end: bool = False) -> list[tuple[str, str]]:
    """Return (state, inode) of the sockets with this local port, or with ``either_end`` also with
    this remote port.

    The kernel does not list sockets that are only bound.
    """
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        rows = [line.split() for line in (read_text(table) or "").splitlines()[1:]]
        ends = (1, 2) if either_end else (1,)
        found += [
            (row[3], row[9])
            for row in rows
            if any(int(row[end].rpartition(":")[2], 16) == number for end in ends)
        ]
    return found


def _only_time_wait(number: int) -> bool:
    return {state for state, _ in _sockets(number)} == {_TIME_WAIT}


def _listening_process(number: int) -> str | None:
    """Return a description of the process that listens on a port, if any."""
    inodes = {inode for state, inode in _sockets(number) if state == _LISTEN}
    if not inodes:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{descriptor}") in wanted:
                    with open(f"/proc/{pid}/cmdline", "rb") as file:
                        command = " ".join(
                            file.read(400).replace(b"\0", b" ").decode(errors="replace").split()
                        )
                    return f"pid {pid} ({command[:80]})"
        except OSError:
            continue
    return "a process of another user"
