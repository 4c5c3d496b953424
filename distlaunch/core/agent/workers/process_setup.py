"""Functions for a process just after a fork: descriptors, process names, signals and exec.

Most of them wrap kernel services that Python does not offer (prctl, close_range, signal without a
handler).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import signal
import termios
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NoReturn

from distlaunch.core.protocol import spawner_messages as w

NO_WORKER = 127
"""Exit code of a child that failed before exec. The child has written the reason to a pipe."""
_SET_PDEATHSIG = 1
_SET_NAME = 15
_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl
_prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]
_prctl_name = _libc["prctl"]
_prctl_name.argtypes = [ctypes.c_int, ctypes.c_char_p]
_signal = _libc.signal
_signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
_signal.restype = ctypes.c_void_p
_close_range = getattr(_libc, "close_range", None)  # glibc 2.34
_DEFAULT, _IGNORE = 0, 1
_STAT_BYTES = 4096


def exec_worker(
    order: w.Spawn,
    setup: w.Setup,
    descriptors: Sequence[int],
    spawner: int,
    failures: int,
    ignored: tuple[int, ...],
) -> NoReturn:
    """Execute the order's program in this forked child.

    On failure, writes ``<pid> <step> <errno>`` to ``failures`` and exits with ``NO_WORKER``.
    """
    step = "setup"
    try:
        os.setsid()
        die_with_parent(signal.SIGKILL)
        if os.getppid() != spawner:  # it was killed before prctl took effect
            os._exit(NO_WORKER)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if number < 32:
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        move_descriptors(descriptors, order.descriptors)
        if order.terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != setup.nofile:
            resource.setrlimit(resource.RLIMIT_NOFILE, (setup.nofile, hard))
        if order.cpus is not None:
            step = "affinity"
            os.sched_setaffinity(0, order.cpus)
        step = "chdir"
        os.chdir(setup.cwd)
        step = "exec"
        env = {**setup.env, **order.env}
        os.execvpe(order.argv[0], order.argv, env)
    except (OSError, ValueError) as exc:  # ValueError: a NUL in an argument or variable
        if step == "exec" and isinstance(exc, FileNotFoundError) and os.path.exists(order.argv[0]):
            step = "interpreter"
        code = exc.errno if isinstance(exc, OSError) else errno.EINVAL
        os.write(failures, f"{os.getpid()} {step} {code or 0}\n".encode())
    finally:
        os._exit(NO_WORKER)


def move_descriptors(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Duplicate each descriptor to its number in the program that this process will execute.

    A new number may be the present number of another of them.
    """
    above = max(numbers, default=0) + 1
    for descriptor, number in zip(
        [
            fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) if each in numbers else each
            for each in descriptors
        ],
        numbers,
        strict=True,
    ):
        os.dup2(descriptor, number)


def become_subreaper() -> None:
    """Make this process, not init, the parent of orphaned descendants. Raises OSError."""
    if _prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent(signum: int) -> None:
    """Send ``signum`` to this process when its parent's thread that forked it ends.

    The parent may already have ended, so the caller must check getppid() afterwards. Raises
    OSError.
    """
    if _prctl(_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def rename_process(name: str, title: str) -> None:
    """Set what ``ps`` shows: ``name`` (15 bytes) as the command, ``title`` instead of the
    arguments.

    The arguments are in memory from arg_start to arg_end (fields 48 and 49 of ``/proc/self/stat``).
    """
    _prctl_name(_SET_NAME, os.fsencode(name)[:15])
    stat = os.open(
        "/proc/self/stat", os.O_RDONLY | os.O_CLOEXEC
    )  # ``open`` would write to more memory
    try:
        fields = os.read(stat, _STAT_BYTES).rpartition(b")")[2].split()
    finally:
        os.close(stat)
    start, end = int(fields[45]), int(fields[46])
    if start and end - start > 1:
        text = os.fsencode(title)[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def ignore_signals(ignored: Collection[int], *, default: Collection[int] = ()) -> None:
    """Ignore the signals in ``ignored`` and reset those in ``default``, by the C library instead of
    Python's ``signal``.

    For a process without handlers that should write little to memory shared with its parent.
    """
    for number in ignored:
        _signal(number, _IGNORE)
    for number in default:
        _signal(number, _DEFAULT)


def close_all() -> None:
    """Close all descriptors. 0 to 2 become ``/dev/null``."""
    if (
        _close_range is None or _close_range(0, ctypes.c_uint(-1), 0) != 0
    ):  # missing in kernels before 5.9
        close_all_but(())
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(1, 3):
        os.dup2(null, descriptor)


def close_all_but(keep: Collection[int]) -> None:
    """Close all inherited descriptors except these."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            with suppress(OSError):
                os.close(int(name))
