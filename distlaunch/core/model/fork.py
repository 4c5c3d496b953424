"""Fork helper processes that a debugger does not follow.

debugpy replaces ``os.fork`` so that the child connects to the debugger and waits for its client. A
helper must not connect. A worker connects once, when it is started with exec.
"""

from __future__ import annotations

import os
import posix
import sys


def is_debugged() -> bool:
    """Return whether a debugger follows the programs executed by this process."""
    return "pydevd" in sys.modules


def fork_helper() -> int:
    """Fork a helper process like ``os.fork``, but without a debugger that follows this process."""
    pydevd = sys.modules.get("pydevd")
    if pydevd is None or not hasattr(pydevd, "skip_subprocess_arg_patch"):
        return os.fork()
    with pydevd.skip_subprocess_arg_patch():
        return os.fork()


def fork_from_helper() -> int:
    """Fork a helper process again: another helper, or a child that executes a program.

    A helper has no debugger. If the program is Python, the debugger follows it as a child of the
    debugged process, the parent of the first helper. ``os.fork`` would record the child's real
    parent.
    """
    return posix.fork()
