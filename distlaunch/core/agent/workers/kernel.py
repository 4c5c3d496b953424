"""The few kernel services that Python does not wrap."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection
from contextlib import suppress

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


def become_subreaper() -> None:
    """Have orphaned descendants given to this process, not to init, so that none can get away."""
    if _prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent(signum: int) -> None:
    """Get ``signum`` when the parent's thread that forked us ends. The caller checks getppid() afterwards."""
    if _prctl(_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def rename_process(name: str, title: str) -> None:
    """Set what ``ps`` shows: ``name`` (15 bytes) as the command, ``title`` in place of the argument list.

    The list lies in this process's own memory, from arg_start to arg_end (fields 48 and 49 of ``/proc/self/stat``).
    """
    _prctl_name(_SET_NAME, os.fsencode(name)[:15])
    stat = os.open("/proc/self/stat", os.O_RDONLY | os.O_CLOEXEC)  # ``open`` would make a small process write to more
    try:
        fields = os.read(stat, _STAT_BYTES).rpartition(b")")[2].split()
    finally:
        os.close(stat)
    start, end = int(fields[45]), int(fields[46])
    if start and end - start > 1:
        text = os.fsencode(title)[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def ignore_signals(ignored: Collection[int], *, default: Collection[int] = ()) -> None:
    """Ignore signals, or give them their default, without Python's part in it.

    For a process that runs no handlers and is to write to little of the memory that it shares.
    """
    for number in ignored:
        _signal(number, _IGNORE)
    for number in default:
        _signal(number, _DEFAULT)


def close_all() -> None:
    """Close all descriptors; 0 to 2 become ``/dev/null``."""
    if _close_range is None or _close_range(0, ctypes.c_uint(-1), 0) != 0:  # kernels before 5.9 have no such call
        close_all_but(())
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(1, 3):
        os.dup2(null, descriptor)


def close_all_but(keep: Collection[int]) -> None:
    """Close all descriptors that this process has inherited, but for these."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            with suppress(OSError):
                os.close(int(name))
