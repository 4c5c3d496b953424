"""Entry point of an agent that is a process of its own.

The transport starts a Python with a stub (``transport.bootstrap.stub``), which puts the zip with
this code on ``sys.path`` and calls ``main``. Descriptors 0 and 1 are the connection to the
coordinator. The reason for an exit is written to descriptor 2.
"""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from distlaunch.core.agent.workers.spawner import start_spawner
from distlaunch.core.errors import EXIT_SOFTWARE
from distlaunch.core.protocol.agent_messages import GREETING, SILENCE_S

ORPHAN_S = 5.0
"""Time between TERM and KILL if the coordinator vanishes before it has sent another value; the
default of --failure-grace."""
LOWEST_CHANNEL_FD = 200
"""Lowest number for the connection's descriptors. Descriptors of workers have lower numbers."""
_MOST_FILES = 1 << 16
_REASON_BYTES = 4096


def main(token: str, code_fd: int, *, silence_s: float = SILENCE_S) -> NoReturn:
    """Run the agent of this node and exit.

    ``token`` is the launcher's random token for the greeting; ``code_fd`` is the zip's descriptor.
    """
    code = EXIT_SOFTWARE
    try:
        greeting = GREETING + token.encode() + b"\n"
        code = serve(
            _move_connection, code_fd, greeting=greeting, reports_signals=False, silence_s=silence_s
        )
    except OSError as exc:
        of = f": {exc.filename}" if exc.filename else ""
        write_exit_reason(f"the agent cannot run: {exc.strerror or exc}{of}")
    except Exception:  # noqa: BLE001 - no caller could report it
        import traceback

        write_exit_reason(traceback.format_exc())
    finally:
        os._exit(code)  # threads may be stuck in a file system


def serve(
    open_channel: Callable[[], tuple[int, int]],
    code_fd: int,
    *,
    greeting: bytes,
    reports_signals: bool,
    silence_s: float = SILENCE_S,
) -> int:
    """Run the agent over the descriptors that ``open_channel`` returns, and return its exit code.

    With ``reports_signals``, the agent reports signals to the coordinator instead of exiting.
    Raises OSError if the agent cannot be set up.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    nofile = _raise_descriptor_limit()
    reading, writing = open_channel()
    os.set_inheritable(code_fd, False)  # noqa: FBT003 - positional-only in the standard library
    # Exclude existing objects from collection: visiting them would copy memory pages in forked
    # children.
    gc.freeze()
    gc.enable()  # the launcher's stub has disabled it
    channel, watcher = start_spawner(
        job_id="", orphan_grace_s=ORPHAN_S, keep=(code_fd,), watched=reading
    )

    from distlaunch.core.agent.remote_agent import RemoteAgent

    agent = RemoteAgent(
        greeting=greeting,
        code_fd=code_fd,
        reading=reading,
        writing=writing,
        nofile=nofile,
        silence_s=silence_s,
        channel=channel,
        watcher=watcher,
        reports_signals=reports_signals,
        orphan_grace_s=ORPHAN_S,
        write_reason=write_exit_reason,
    )
    return agent.run()


def write_exit_reason(text: str) -> None:
    """Write the reason of the exit to stderr, unless that would block."""
    with suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"distlaunch: {text}\n".encode("utf-8", "replace")[:_REASON_BYTES])


def _move_connection() -> tuple[int, int]:
    """Move the connection away from descriptors 0 and 1, and return its two new descriptors.

    Any code may print to descriptor 1. It now leads to stderr, and 0 to /dev/null.
    """
    try:
        reading, writing = (
            fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, LOWEST_CHANNEL_FD) for number in (0, 1)
        )
    except OSError:  # the limit of open files is low
        reading, writing = (fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3) for number in (0, 1))
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    try:
        same = os.path.samestat(os.fstat(2), os.fstat(writing))
    except OSError:  # there is no stderr
        same = True
    if same:
        os.dup2(null, 2)
    os.dup2(2, 1)
    os.close(null)
    return reading, writing


def _raise_descriptor_limit() -> int:
    """Raise the limit of open files. Return the previous soft limit, for the workers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return soft
