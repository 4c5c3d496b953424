"""Processes of our own that a debugger must not follow.

debugpy replaces ``os.fork``: the child connects to the debugger and waits until the client has
answered. Only workers are to do that, when they are executed, and each of them once.
"""

from __future__ import annotations

import os
import posix
import sys


def is_debugged() -> bool:
    """Return whether a debugger follows the programs that this process executes."""
    return "pydevd" in sys.modules


def fork_helper() -> int:
    """Fork a helper process of ours, as ``os.fork`` does; it runs without the debugger that this
    process may have."""
    pydevd = sys.modules.get("pydevd")
    if pydevd is None or not hasattr(pydevd, "skip_subprocess_arg_patch"):
        return os.fork()
    with pydevd.skip_subprocess_arg_patch():
        return os.fork()


def fork_from_helper() -> int:
    """Fork a helper, which has no debugger: another helper, or a child that executes a program.

    The debugger follows the program if it is Python. It knows it as a child of the process that is
    being debugged, the parent of the first helper; ``os.fork`` would have it note the parent that
    the child really has.
    """
    return posix.fork()
