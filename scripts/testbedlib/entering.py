"""Going into a host between fork and exec, so that the command is as near to its parent as pids of
its own allow.

Pids are chosen at birth: a second process has to be forked for the command. The first one stays
outside and stands for the command: it hands signals on, ends as the command does, and the command
is killed when it is. Unlike nsenter(1) it does not stop with the command, for a stopped parent that
reaps nobody keeps a whole host from ending.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Mapping

from testbedlib import kernel

_SENT_BY_THE_TERMINAL = 0x80
"""si_code SI_KERNEL: the command has got it, too."""


def preparation(
    namespaces: Mapping[str, str], cwd: str, before: Callable[[], object] | None = None
) -> Callable[[], None]:
    """Return Popen's ``preexec_fn`` for a command on a host, given the files of its namespaces, by
    their names in /proc.

    ``before`` is run first, outside.
    """

    def enter() -> None:
        if before is not None:
            before()
        fds = {name: os.open(path, os.O_RDONLY | os.O_CLOEXEC) for name, path in namespaces.items()}
        kernel.setns(fds.pop("pid"))
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        child = os.fork()
        if child:
            try:
                _stand_for(child)
            finally:
                os._exit(1)
        kernel.die_with_parent()
        for fd in fds.values():
            kernel.setns(fd)
        os.chdir(cwd)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return enter


def _stand_for(child: int) -> None:
    os.closerange(0, 65536)
    while True:
        message = signal.sigwaitinfo(signal.valid_signals())
        if message.si_signo == signal.SIGCHLD:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                _end_as(os.waitstatus_to_exitcode(status))
        elif message.si_code != _SENT_BY_THE_TERMINAL:
            os.kill(child, message.si_signo)


def _end_as(code: int) -> None:
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
    os.kill(os.getpid(), -code)
    os._exit(128 - code)
