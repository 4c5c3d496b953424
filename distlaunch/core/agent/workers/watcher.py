"""The watcher: a process between agent and spawner that kills the processes left by a killed
spawner.

It is needed when both are killed. If only the agent is killed, the spawner ends the workers; if
only the spawner is killed, the agent does. The watcher is the spawner's parent and a subreaper, so
it adopts all descendants of the workers. (A cgroup would need such a process, too: the kernel does
not kill the processes of a cgroup by itself.)

It is forked from the agent and only waits, so it shares nearly all of its memory.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from contextlib import suppress
from typing import NoReturn

from distlaunch.core.agent.workers import process_tree
from distlaunch.core.agent.workers.process_setup import (
    close_all,
    die_with_parent,
    ignore_signals,
    rename_process,
)

NAME = "dl-watcher"
"""Without distlaunch, python and the spawner's name, so that no kill pattern hits both."""
CLEANERS_S = 2.0
"""How long processes that clean up after workers (shared memory) may run before they are killed."""
_FIRST_STEP_S = 0.002
_LONGEST_STEP_S = 5.0
_IGNORED = tuple(
    map(
        int,
        (
            *(
                signal.SIGTERM,
                signal.SIGINT,
                signal.SIGHUP,
                signal.SIGQUIT,
                signal.SIGUSR1,
                signal.SIGUSR2,
            ),
            *(signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGPIPE, signal.SIGWINCH),
        ),
    )
)
_SIGCHLD, _SIGCONT = int(signal.SIGCHLD), int(signal.SIGCONT)
"""Plain integers: looking up enum members takes more memory."""


def name_process(job_id: str) -> None:
    """Name this process as a watcher."""
    rename_process(NAME, f"{NAME}: of job {job_id}" if job_id else NAME)


def watch(spawner: int) -> NoReturn:
    """Wait for the end of the spawner, a child of this process. Kill the processes that it left,
    and exit with its status."""
    status = 0
    try:
        gc.disable()  # a collection would copy the memory shared with the agent
        ignore_signals(
            _IGNORED, default=(_SIGCHLD,)
        )  # with an inherited SIG_IGN for SIGCHLD, waiting would be impossible
        die_with_parent(
            _SIGCONT
        )  # resumes this process, if somebody has stopped it, when the agent ends
        close_all()  # most of all the connection, whose end others wait for
        status = _await_end(spawner)
        _kill_children(only_once=status == 0)
    finally:
        _end_as(status)


def _await_end(spawner: int) -> int:
    """Return the wait status of the spawner. Resume it if it is stopped."""
    while True:
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if not os.WIFSTOPPED(status) and pid == spawner:
            return status
        if os.WIFSTOPPED(status):
            process_tree.send(pid, signal.SIGCONT)


def _kill_children(*, only_once: bool) -> None:
    """Kill adopted processes until none remains, or once."""
    began = time.monotonic()
    step_s = _FIRST_STEP_S
    while True:
        _reap()
        waits_for_cleaners = time.monotonic() < began + CLEANERS_S
        children = process_tree.children_of(os.getpid())
        process_tree.kill_each_tree(
            pid for pid in children if not (waits_for_cleaners and process_tree.is_cleaner(pid))
        )
        if not children or only_once:
            return
        time.sleep(step_s)
        if not waits_for_cleaners:  # something is stuck in the kernel
            step_s = min(2 * step_s, _LONGEST_STEP_S)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _end_as(status: int) -> NoReturn:
    """Exit with this wait status, which the agent reports to the user."""
    if os.WIFSIGNALED(status):
        signum = os.WTERMSIG(status)
        if signum != signal.SIGKILL:
            signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)
