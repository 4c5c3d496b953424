"""Layer core.agent: the few kernel services that Python does not wrap."""

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
    buffer = ctypes.create_string_buffer(os.fsencode(name)[:15])
    _prctl(_SET_NAME, ctypes.addressof(buffer), 0, 0, 0)
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if start and end - start > 1:
        text = os.fsencode(title)[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def close_all_but(keep: Collection[int]) -> None:
    """Close all descriptors that this process has inherited, but for these."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            with suppress(OSError):
                os.close(int(name))
