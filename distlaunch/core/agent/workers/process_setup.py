"""What turns a child that the spawner has forked into a program: a worker, or the warm server."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import termios
from collections.abc import Sequence
from typing import NoReturn

from distlaunch.core.agent.workers.kernel import die_with_parent
from distlaunch.core.protocol import spawner_messages as w

NO_WORKER = 127
"""Exit code of a child that could not become what it was forked for; why is in the pipe of failures."""


def place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors other numbers, for programs that are executed, also where such a number is another's old one."""
    above = max(numbers, default=0) + 1
    for descriptor, number in zip(
        [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) if each in numbers else each for each in descriptors],
        numbers,
        strict=True,
    ):
        os.dup2(descriptor, number)


def become(
    order: w.Spawn, setup: w.Setup, descriptors: Sequence[int], spawner: int, failures: int, ignored: tuple[int, ...]
) -> NoReturn:
    """Run the order's program in this forked child; on failure write ``<pid> <step> <errno>`` and end with 127."""
    step = "setup"
    try:
        os.setsid()
        die_with_parent(signal.SIGKILL)
        if os.getppid() != spawner:  # it was killed before the line above could take effect
            os._exit(NO_WORKER)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if number < 32:
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        place(descriptors, order.descriptors)
        if order.terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != setup.nofile:
            resource.setrlimit(resource.RLIMIT_NOFILE, (setup.nofile, hard))
        if order.cpus is not None:
            step = "affinity"
            os.sched_setaffinity(0, order.cpus)
        step = "chdir"
        os.chdir(setup.cwd)
        step = "exec"
        env = {**setup.env, **order.env}
        os.execvpe(order.argv[0], order.argv, env)
    except (OSError, ValueError) as exc:  # ValueError: a NUL in an argument or variable
        if step == "exec" and isinstance(exc, FileNotFoundError) and os.path.exists(order.argv[0]):
            step = "interpreter"
        code = exc.errno if isinstance(exc, OSError) else errno.EINVAL
        os.write(failures, f"{os.getpid()} {step} {code or 0}\n".encode())
    finally:
        os._exit(NO_WORKER)
