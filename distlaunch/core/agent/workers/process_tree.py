"""Process trees: find their processes in /proc, signal them without hitting a recycled pid, and
reap them.

Linux only. Functions that read /proc return an empty result for a process that is gone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial

_MAX_PASSES = 64
_DESCRIPTORS = 4096
"""Largest number of open files to examine."""
_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render", "/dev/accel", "/dev/dxg")
_COMMAND_BYTES = 4096
_COMMAND_CHARS = 80
_EXEC_S = 0.25
"""How long exec may take on a loaded machine."""
_EXEC_STEP_S = 0.001
_MOST_EMPTY = 4096
_stayed_empty: dict[int, int] = {}
"""pid -> start time of live processes whose command line stayed empty for ``_EXEC_S``."""
_KERNEL_LISTS_CHILDREN = os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
_STEP_S = 0.002


def children_of(pid: int) -> list[int]:
    """Return the direct children of a process."""
    if not _KERNEL_LISTS_CHILDREN:
        return _children_by_parent().get(pid, [])
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for task in tasks:  # a thread may end in the meantime; continue with the next
        with suppress(OSError), open(f"/proc/{pid}/task/{task}/children", "rb") as file:
            found += map(int, file.read().split())
    return found


def _children_by_parent() -> dict[int, list[int]]:
    """Return all processes as parent -> children, for kernels without
    ``/proc/PID/task/TID/children``."""
    found: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        facts = stat_of(int(name))
        if facts is not None:
            found.setdefault(facts[1], []).append(int(name))
    return found


def descendants_of(pid: int) -> list[int]:
    """Return all descendants of a process, children before grandchildren.

    Some may be missing if the tree changes meanwhile. Repeat until the result is empty.
    """
    below = children_of if _KERNEL_LISTS_CHILDREN else partial(_children_in, _children_by_parent())
    found: list[int] = []
    queue = [pid]
    while queue:
        children = below(queue.pop())
        found += children
        queue += children
    return found


def _children_in(snapshot: Mapping[int, list[int]], pid: int) -> list[int]:
    return snapshot.get(pid, [])


def stat_of(pid: int) -> tuple[str, int, int, int, int] | None:
    """Return state, parent, session, start time (ticks since boot) and process group; None if it is
    gone."""
    fields = _stat_fields(pid)
    if fields is None:
        return None
    return fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]), int(fields[2])


def cpu_s_of(pid: int) -> float:
    """Return the processor time of a process with all its threads, in seconds."""
    fields = _stat_fields(pid)
    if fields is None:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _stat_fields(pid: int) -> list[bytes] | None:
    """Return the fields of ``/proc/PID/stat`` from the state on; None if the process is gone or
    hidden."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:  # gone, or hidden from this user (hidepid)
        return None


def children_cpu_s_of(pid: int) -> float:
    """Return the processor time of a worker's descendants in seconds.

    Of descendants that hold a GPU, only forks of the worker count (``Stack.children_cpu_s``).
    """
    total, own = 0.0, b""
    for child in descendants_of(pid):
        if holds_gpu(child):
            own = own or _command(pid)
            if _command(child) != own:
                continue
        total += cpu_s_of(child)
    return total


def holds_gpu(pid: int) -> bool:
    """Return whether a process has an accelerator's device open."""
    folder = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(folder)[:_DESCRIPTORS]
    except OSError:
        return False
    for number in numbers:
        with suppress(OSError):
            device = os.readlink(f"{folder}/{number}")
            if device.startswith(_GPU_DEVICES) and device != "/dev/nvidiactl":
                return True
    return False


def send(pid: int, signum: int, *, parent_or_ancestor: int | None = None) -> bool:
    """Signal a process. Return whether the signal was sent: the process exists, and this user may
    signal it.

    With ``parent_or_ancestor``, the process must descend from that process at that moment, which
    excludes a recycled pid. The caller's own unreaped children need no such check. A pidfd is used
    if the kernel grants one.
    """
    descriptor = _pidfd(pid)
    try:
        if parent_or_ancestor is not None and not _descends_from(pid, parent_or_ancestor):
            return False
        if descriptor >= 0:
            signal.pidfd_send_signal(descriptor, signum)
        else:
            os.kill(pid, signum)
    except OSError:
        return False
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return True


def _pidfd(pid: int) -> int:
    """Return a pidfd; -1 if the kernel, a sandbox or this Python (conda's) has none."""
    opened = getattr(os, "pidfd_open", None)
    if opened is None or not hasattr(signal, "pidfd_send_signal"):
        return -1
    try:
        return int(opened(pid))
    except OSError:
        return -1


def _descends_from(pid: int, ancestor: int) -> bool:
    while pid > 1:
        facts = stat_of(pid)
        if facts is None:
            return False
        pid = facts[1]
        if pid == ancestor:
            return True
    return False


def send_to_group(leader: int, signum: int) -> None:
    """Signal the process group of an unreaped child, if it still exists."""
    with suppress(OSError):
        os.killpg(leader, signum)


def signal_tree(
    root: int, signum: int, *, include_root: bool, spare_cleaners: bool = False
) -> None:
    """Send KILL, STOP or CONT to a tree of this process's descendants, deepest processes first.

    Repeat for processes that appear meanwhile. A child of a dead parent becomes a child of this
    process, so any descendant of this process may be signalled.
    """
    sent: set[int] = set()
    for _ in range(_MAX_PASSES):
        new = [
            pid
            for pid in descendants_of(root)
            if pid not in sent and not (spare_cleaners and is_cleaner(pid))
        ]
        if not new:
            break
        for pid in reversed(new):
            send(pid, signum, parent_or_ancestor=os.getpid())
        sent.update(new)
    if include_root:
        send(root, signum)


def kill_each_tree(roots: Iterable[int]) -> None:
    """Kill several trees. A tree is stopped first, so that none of its processes can fork.

    Cleaners (``is_cleaner``) below a root are spared. They exit by themselves when their work is
    done.
    """
    for root in roots:
        signal_tree(root, signal.SIGSTOP, include_root=True, spare_cleaners=True)
        signal_tree(root, signal.SIGKILL, include_root=True, spare_cleaners=True)


class ChildReaper:
    """Reaps the processes that this process adopts, but not the children that it had at the start:
    a script that ends in ``exec distlaunch`` leaves its children to the launcher."""

    def __init__(self, child: int) -> None:
        self._child = child
        self._strangers = frozenset(children_of(os.getpid())) - {child}

    def await_child(self, *, bound_s: float) -> int | None:
        """Reap the child and return its wait status; None if it has not exited within
        ``bound_s``."""
        deadline = time.monotonic() + bound_s
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(self._child, os.WNOHANG)
                if pid:
                    return status
                if time.monotonic() > deadline:
                    break
                time.sleep(_STEP_S)
        return None

    def kill(self, *, bound_s: float) -> int | None:
        """Kill and reap the child and all adopted processes, for at most ``bound_s``. Return the
        child's wait status, unless it had been reaped."""
        deadline = time.monotonic() + bound_s
        status = None
        while True:
            seen = self._reap_all()
            status = seen if status is None else status
            children = [pid for pid in children_of(os.getpid()) if pid not in self._strangers]
            if not children or time.monotonic() > deadline:
                return status
            kill_each_tree(children)
            time.sleep(_STEP_S)

    def _reap_all(self) -> int | None:
        status = None
        with suppress(ChildProcessError):
            while True:
                pid, found = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._child:
                    status = found
        return status

    def reap_adopted(self) -> None:
        """Reap adopted processes: the first process of a container gets every orphan."""
        for pid in children_of(os.getpid()):
            if pid != self._child:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def is_cleaner(pid: int) -> bool:
    """Return whether a process removes a worker's shared memory after the worker has exited.

    That is Python's resource tracker (``-c "from multiprocessing.resource_tracker import
    main;..."``) or torch's shared-memory manager. Killing it too early would leave files in
    /dev/shm.
    """
    arguments = _command(pid)
    return (
        b"\0from multiprocessing.resource_tracker import main" in arguments
        or b"torch_shm_manager\0" in arguments
    )


def is_part_of_parent(pid: int, parent: int) -> bool:
    """Return whether a process works for its parent: a fork of it, or a process of Python's
    multiprocessing.

    The parent would fail if such a process (a data loader) ended earlier.
    """
    arguments = _command(pid)
    return b"\0from multiprocessing." in arguments or (
        bool(arguments) and arguments == _command(parent)
    )


def command_line(pid: int) -> str:
    """Return a process's command in at most 80 characters, without the program's directory."""
    first, *others = (
        _command(pid).removesuffix(b"\0").decode("utf-8", "backslashreplace").split("\0")
    )
    if " " not in first:  # otherwise it is a title that the process has set
        first = first.rpartition("/")[2]
    text = " ".join((first, *others)).strip()
    if not text:
        try:
            with open(f"/proc/{pid}/comm", "rb") as file:
                text = file.read().strip().decode("utf-8", "backslashreplace")
        except OSError:
            return "?"
    return text if len(text) <= _COMMAND_CHARS else text[: _COMMAND_CHARS - 3] + "..."


def _command(pid: int) -> bytes:
    """Return a process's arguments, each ended by NUL.

    They are empty during exec: after vfork, the parent continues before the new program has begun.
    The function waits for it at most ``_EXEC_S``, once per process, because some processes have no
    arguments.
    """
    deadline = time.monotonic() + _EXEC_S
    while True:
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                arguments = file.read(_COMMAND_BYTES)
        except OSError:
            return b""
        facts = None if arguments else stat_of(pid)
        if facts is None or facts[0] in "ZXTt" or _stayed_empty.get(pid) == facts[3]:
            return arguments
        if time.monotonic() > deadline:
            if len(_stayed_empty) >= _MOST_EMPTY:
                _stayed_empty.clear()
            _stayed_empty[pid] = facts[3]
            return arguments
        time.sleep(_EXEC_STEP_S)


def catches(pid: int, signum: int) -> bool:
    """Return whether a process has a handler for a signal."""
    with suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def cookie_rank(pid: int, cookie: str) -> int | None:
    """Return the rank of the worker from which a process descends, by its initial environment; None
    without this agent's cookie."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return None
    if b"DISTLAUNCH_COOKIE=" + cookie.encode() not in variables:
        return None
    for variable in variables:
        if variable.startswith(b"RANK=") and variable[5:].isdigit():
            return int(variable[5:])
    return None
