"""Run the words given where the kernel refuses pidfd_open and pidfd_send_signal with ENOSYS, as old kernels and some sandboxes do."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PIDFD_OPEN, _PIDFD_SEND_SIGNAL = 434, 424  # the same numbers on all architectures


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def refuse_pidfd() -> None:
    """Install the filter, for this process and all that it starts."""
    instructions = [
        (_LOAD_WORD, 0, 0, 0),  # the number of the system call
        (_JUMP_IF_EQUAL, 2, 0, _PIDFD_OPEN),
        (_JUMP_IF_EQUAL, 1, 0, _PIDFD_SEND_SIGNAL),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in instructions))
    program = _Program(len(instructions), ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(38, 1, 0, 0, 0) or prctl(22, 2, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    refuse_pidfd()
    os.execv(sys.argv[1], sys.argv[1:])
