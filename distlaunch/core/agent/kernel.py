"""Layer core.agent: the few kernel services that Python does not wrap."""

from __future__ import annotations

import ctypes
import os

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


def name_process(name: str) -> None:
    """Set what ``ps -o comm`` shows, at most 15 bytes."""
    buffer = ctypes.create_string_buffer(os.fsencode(name)[:15])
    _prctl(_SET_NAME, ctypes.addressof(buffer), 0, 0, 0)
