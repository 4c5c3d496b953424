"""The watcher, a process between the agent and the spawner, which ends what a killed spawner
leaves.

The spawner ends the workers if the agent is killed, and the agent does so if the spawner is killed.
If both are killed, the watcher does: it is the spawner's parent and a subreaper, so each process
that the workers have started falls to it. A cgroup would need a process for that as well, since the
kernel does not end one by itself.

It is forked from the agent and does nothing but wait, so that it shares nearly all of its memory.
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
"""Holds neither distlaunch, nor python, nor the spawner's name: no pattern should hit both."""
CLEANERS_S = 2.0
"""How long processes that clean up after ended workers (their shared memory) may take before they
get KILL as well."""
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
"""Plain numbers: an enum's members take more memory to look up."""


def name_process(job_id: str) -> None:
    """Call this process the watcher, in its list of arguments as well."""
    rename_process(NAME, f"{NAME}: of job {job_id}" if job_id else NAME)


def watch(spawner: int) -> NoReturn:
    """Wait in this forked child until the spawner, its child, has ended. Then kill what it left,
    and end as it did."""
    status = 0
    try:
        gc.disable()  # a collection would copy the memory that is shared with the agent
        ignore_signals(
            _IGNORED, default=(_SIGCHLD,)
        )  # if our starter ignored SIGCHLD, nothing could be waited for
        die_with_parent(
            _SIGCONT
        )  # if somebody has stopped this process, it must go on when the agent ends
        close_all()  # above all the channel, whose end others wait for
        status = _await_end(spawner)
        _kill_children(only_once=status == 0)
    finally:
        _end_as(status)


def _await_end(spawner: int) -> int:
    """Return the wait status of the spawner. If somebody stops it, let it go on: it would see no
    worker's end."""
    while True:
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if not os.WIFSTOPPED(status) and pid == spawner:
            return status
        if os.WIFSTOPPED(status):
            process_tree.send(pid, signal.SIGCONT)


def _kill_children(*, only_once: bool) -> None:
    """KILL what has fallen to this process, until nothing is left."""
    began = time.monotonic()
    step_s = _FIRST_STEP_S
    while True:
        _reap()
        is_patient = time.monotonic() < began + CLEANERS_S
        children = process_tree.children_of(os.getpid())
        process_tree.kill_each_tree(
            pid for pid in children if not (is_patient and process_tree.is_cleaner(pid))
        )
        if not children or only_once:
            return
        time.sleep(step_s)
        if not is_patient:  # something is wedged in the kernel
            step_s = min(2 * step_s, _LONGEST_STEP_S)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _end_as(status: int) -> NoReturn:
    """End with a wait status like this one: the agent tells the user how the spawner ended."""
    if os.WIFSIGNALED(status):
        signum = os.WTERMSIG(status)
        if signum != signal.SIGKILL:
            signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)
