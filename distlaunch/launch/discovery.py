"""Run the user's --discover command, which prints the hosts that are available.

No process of the command may outlive the launcher. So the launcher starts a guard process, a
subreaper, which starts the command and becomes the parent of each process that the command leaves.
The guard kills these processes when the command has ended. It also kills them when the launcher has
ended, which the guard notices because a pipe is closed.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NoReturn

from distlaunch.core.agent.workers.process_setup import (
    NO_WORKER,
    become_subreaper,
    die_with_parent,
    move_descriptors,
)
from distlaunch.core.agent.workers.process_tree import ChildReaper
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.fork import fork_from_helper, fork_helper
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import quoted
from distlaunch.planning.hosts.from_options import command_of

DISCOVER_S = 60.0
_MOST_BYTES = 64 << 20
_CHUNK = 1 << 16
_LOOK_S = 0.02
"""How often the guard checks whether the command has ended."""
_KILL_S = 5.0


def run_discover(
    command: str,
    environ: Mapping[str, str],
    *,
    who: str | None = None,
    timeout_s: float = DISCOVER_S,
    most: int = _MOST_BYTES,
) -> str:
    """Run the command with a shell, as Horovod does, and return its output.

    Raises ConfigError, with the last message of the command, if the command fails, takes longer
    than ``timeout_s``, or prints more than ``most`` bytes. ``who`` is the option or variable that
    has the command.
    """
    where = command_of(command, who or str(Opt.DISCOVER))
    if "\0" in command:
        raise ConfigError(f"{where}: a command cannot have a NUL")
    try:
        output, errors, code, problem = _run_watched(command, environ, timeout_s, most)
    except OSError as exc:
        raise ConfigError(f"{where}: cannot be run: {os.strerror(exc.errno or 0)}") from exc
    words = errors.decode(errors="surrogateescape").split("\n")
    last = next((line.strip() for line in reversed(words) if line.strip()), None)
    message = "" if last is None else f"; its last message is {quoted(last)}"
    if problem:
        raise ConfigError(
            f"{where}: {problem}{message}",
            hint="the command must print a line for each host, HOST:SLOTS, and exit",
        )
    if code:
        how = f"exit code {code}" if code > 0 else f"signal {_signal_name(-code)}"
        raise ConfigError(
            f"{where}: the command ended with {how}{message}",
            hint="run the command by itself: it must exit with 0",
        )
    return output.decode(errors="surrogateescape")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)


def _run_watched(
    command: str, environ: Mapping[str, str], timeout_s: float, most: int
) -> tuple[bytes, bytes, int, str]:
    """Run the command under a guard. Return stdout, stderr, the exit code, and a problem if the
    command does not end or prints too much, else "".

    Raises OSError if the guard process cannot be started.
    """
    life, ours = os.pipe()
    result, result_end = os.pipe()
    output, output_end = os.pipe()
    errors, errors_end = os.pipe()
    theirs = (life, result_end, output_end, errors_end)
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, signal.valid_signals()
    )  # the guard keeps all signals blocked
    try:
        guard = fork_helper()
        if guard == 0:
            _guard(command, environ, *theirs)
    except OSError:
        for descriptor in (ours, result, output, errors):
            os.close(descriptor)
        raise
    finally:
        for descriptor in theirs:
            os.close(descriptor)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        return _collect_output(output, errors, result, timeout_s, most)
    finally:
        os.close(ours)
        with suppress(ChildProcessError):  # SIGCHLD is ignored
            os.waitpid(guard, 0)
        for descriptor in (result, output, errors):
            os.close(descriptor)


def _collect_output(
    output: int, errors: int, result: int, timeout_s: float, most: int
) -> tuple[bytes, bytes, int, str]:
    deadline_s = time.monotonic() + timeout_s
    read = {output: bytearray(), errors: bytearray(), result: bytearray()}
    poll = select.poll()
    for descriptor in read:
        poll.register(descriptor, select.POLLIN)
    left, problem = set(read), ""
    while left and not problem:
        left_s = deadline_s - time.monotonic()
        ready = poll.poll(max(0.0, left_s) * 1000 if result in left else 0)
        for descriptor, _ in ready:
            chunk = os.read(descriptor, _CHUNK)
            read[descriptor] += chunk
            if not chunk:
                poll.unregister(descriptor)
                left.discard(descriptor)
        if sum(map(len, read.values())) > most:
            problem = f"the command printed over {most >> 20} MiB"
        elif result in left and left_s <= 0:
            problem = f"the command did not end in {timeout_s:g} s"
        elif (
            result not in left and not ready
        ):  # a process that KILL cannot end still has the output open
            break
    if not problem and not read[result]:
        problem = "the guard process of the command was killed"
    return bytes(read[output]), bytes(read[errors]), int(read[result] or b"0"), problem


def _guard(
    command: str, environ: Mapping[str, str], life: int, result: int, output: int, errors: int
) -> NoReturn:
    """Run the command until it ends or the launcher closes the pipe ``life``. Kill all processes
    that remain, and write the exit code to ``result``."""
    try:
        os.setsid()
        become_subreaper()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _close_all_but(life, result, output, errors)
        us = os.getpid()
        child = fork_from_helper()
        if child == 0:
            _become_command(command, environ, us, output, errors)
        os.close(output)
        os.close(errors)
        reaper = ChildReaper(child)
        poll = select.poll()
        poll.register(life, select.POLLIN)
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if poll.poll(_LOOK_S * 1000):
                break
        status = reaper.kill(bound_s=_KILL_S)
        if status is not None:
            os.write(result, str(os.waitstatus_to_exitcode(status)).encode())
    finally:
        os._exit(0)  # never unwind into the launcher's frames


def _become_command(
    command: str, environ: Mapping[str, str], guard_pid: int, output: int, errors: int
) -> NoReturn:
    """Replace this process by the command. ``guard_pid`` is the parent, with which the command ends;
    ``output`` and ``errors`` become stdout and stderr."""
    try:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != guard_pid:  # the guard was killed before the line above took effect
            os._exit(NO_WORKER)
        os.setsid()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        move_descriptors((os.open(os.devnull, os.O_RDONLY), output, errors), (0, 1, 2))
        os.execve("/bin/sh", ["/bin/sh", "-c", command], dict(environ))
    except OSError as exc:
        os.write(2, f"/bin/sh: {os.strerror(exc.errno or 0)}\n".encode())
    finally:
        os._exit(NO_WORKER)


def _close_all_but(*kept: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):
                os.close(int(name))
