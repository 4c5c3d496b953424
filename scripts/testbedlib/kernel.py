"""The few calls that a sandbox needs and Python (3.10) has no function for: namespaces, mounts,
death signals."""

from __future__ import annotations

import ctypes
import os
import signal

CLONE_NEWTIME = 0x00000080
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_MOVE = 0x2000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave the namespaces that we share with others; a new pid namespace begins with the next
    child."""
    _checked(_libc.unshare(flags), "unshare")


def setns(fd: int) -> None:
    """Go into the namespace that a descriptor stands for; for one of pids, only children born from
    now on do."""
    _checked(_libc.setns(fd, 0), "setns")


def children_into_own_pids() -> None:
    """Start the next children of this process in its own pid namespace again, after an ``unshare``
    of pids."""
    fd = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        setns(fd)
    finally:
        os.close(fd)


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    """Mount a file system in this process's mount namespace."""
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()
    )
    _checked(result, f"mount {source} {target} {kind} {data}".rstrip())


def bind(source: str, target: str) -> None:
    """Show a file or a directory, with all that is mounted below it, in another place."""
    mount(source, target, "none", MS_BIND | MS_REC)


def move(source: str, target: str) -> None:
    """Move a mount to another path."""
    mount(source, target, "none", MS_MOVE)


def private_mounts() -> None:
    """Return this process mounts of its own: only its children see what it mounts, and it goes with
    the last of them."""
    unshare(CLONE_NEWNS)
    mount("none", "/", "none", MS_REC | MS_PRIVATE)


def unmount(target: str) -> None:
    """Unmount even what is still in use."""
    _checked(_libc.umount2(target.encode(), _MNT_DETACH), f"umount {target}")


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def started_at(pid: int) -> int | None:
    """Return when a process started, in clock ticks: with its pid that names it for good. None when
    it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in {b"Z", b"X"} else int(fields[19])
