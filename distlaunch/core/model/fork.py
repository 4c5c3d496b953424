"""Fork helper processes that a debugger does not follow.

debugpy replaces ``os.fork``: the child connects to the debugger and waits until the client answers.
Only workers should do that, each of them once, when they are executed.
"""

from __future__ import annotations

import os
import posix
import sys


def is_debugged() -> bool:
    """Return whether a debugger follows the programs that this process executes."""
    return "pydevd" in sys.modules


def fork_helper() -> int:
    """Fork a helper process like ``os.fork``, without the debugger that this process may have."""
    pydevd = sys.modules.get("pydevd")
    if pydevd is None or not hasattr(pydevd, "skip_subprocess_arg_patch"):
        return os.fork()
    with pydevd.skip_subprocess_arg_patch():
        return os.fork()


def fork_from_helper() -> int:
    """Fork from a helper, which has no debugger, another helper or a child that executes a program.

    The debugger follows the program if it is Python, as a child of the process that is being
    debugged, which is the parent of the first helper. ``os.fork`` would record the child's real
    parent instead.
    """
    return posix.fork()
