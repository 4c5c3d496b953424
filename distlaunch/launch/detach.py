"""``train --detach``: the launcher goes on in the background when all workers have started.

The command forks. The child becomes the launcher, in a session of its own, with its console in a
file. The parent shows the console until all workers have started, or until the launcher has ended.
"""

from __future__ import annotations

import json
import os
import select
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distlaunch.core.errors import EXIT_SOFTWARE, ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.run_files import BEFORE, CONSOLE, STDERR, STDOUT
from distlaunch.core.model.text import printable
from distlaunch.core.private_files import open_private
from distlaunch.launch import logind

if TYPE_CHECKING:
    from distlaunch.launch.make_plan import Planned
    from distlaunch.planning.train_options import TrainOptions

_VARIABLE = "_DISTLAUNCH_DETACHED"
"""Has the descriptors of a launcher that systemd-run has started."""
CONSOLE_BYTES = 64 << 20
"""Size of ``console.log`` at which a new one is begun."""
_NEW = ".new"
_CHECK_BYTES = 1 << 20
"""The size is checked after so much output of workers."""
_POLL_S = 0.1
_BLOCK = 1 << 16
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_INTERACTIVE_STEP = "4294967290"
"""SLURM_STEP_ID in the shell that salloc starts on a node of the allocation."""


class DetachedLauncher:
    """The launcher's side of --detach."""

    def __init__(self, status: int, early: int) -> None:
        """``status`` is the pipe to the command that waits for the start. ``early`` is the file
        that stdout and stderr are written to before the run directory exists."""
        self._status = status
        self._early = early
        self._path = ""
        """Of ``console.log``; empty before it exists."""
        self._output_bytes = 0
        """How much output of workers has come since the size of ``console.log`` was checked."""

    def on_run_dir(self, path: str) -> None:
        """Write stdout and stderr to ``console.log`` in the run directory from now on, and tell the
        waiting command.

        The output before is copied there. Raises ConfigError if the file cannot be made.
        """
        try:
            console = _new_console(os.path.join(path, CONSOLE))
        except OSError as exc:
            raise ConfigError(
                f"{CONSOLE} cannot be made in {printable(path)}: {os.strerror(exc.errno or 0)}"
            ) from exc
        copied = self._copy(console, 0)
        for number in (STDOUT, STDERR):
            os.dup2(console, number)
        self._copy(console, copied)
        os.close(console)
        os.close(self._early)
        self._path = os.path.join(path, CONSOLE)
        self._send({"run_dir": path})

    def on_output(self, size: int) -> None:
        """Begin a new ``console.log`` if it has reached ``CONSOLE_BYTES``, and keep the previous one.

        Called by one thread, for each output of workers. What other threads write at that moment is
        in either file.
        """
        self._output_bytes += size
        if self._output_bytes < _CHECK_BYTES or not self._path:
            return
        self._output_bytes = 0
        with suppress(OSError):
            if os.fstat(STDOUT).st_size < CONSOLE_BYTES:
                return
            with suppress(FileNotFoundError):  # left by an attempt that failed half-way
                os.unlink(self._path + _NEW)
            console = _new_console(self._path + _NEW)
            try:
                with suppress(FileNotFoundError):  # somebody has removed it
                    os.replace(self._path, self._path + BEFORE)
                os.replace(self._path + _NEW, self._path)
                for number in (STDOUT, STDERR):
                    os.dup2(console, number)
            finally:
                os.close(console)

    def on_started(self) -> None:
        """Send the waiting command the message that all workers have started, so that it returns."""
        self._send({"started": True})
        os.close(self._status)

    def on_alive(self) -> None:
        """Send the waiting command the message that systemd-run has started the launcher."""
        self._send({"alive": True})

    def _copy(self, console: int, offset: int) -> int:
        """Copy the early output from an offset on. Return the offset of its end."""
        with suppress(OSError):
            while block := os.pread(self._early, _BLOCK, offset):
                os.write(console, block)
                offset += len(block)
        return offset

    def _send(self, message: Mapping[str, object]) -> None:
        with suppress(OSError):  # the command was killed
            os.write(self._status, json.dumps(message).encode("ascii") + b"\n")


def _new_console(path: str) -> int:
    return open_private(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    )


def start_detached(
    run: Callable[[DetachedLauncher], int],
    environ: MutableMapping[str, str],
    *,
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> int:
    """Start the launcher in the background. Return when all its workers have started or it has
    ended.

    Returns in two processes. In the launcher, ``run`` is called with its side of --detach, and its
    result is the exit code. In the command, the result is 0 if all workers have started, else the
    exit code of the launcher. ``say`` and ``warn`` print a line; the name of the job goes to
    stdout. Raises ConfigError where a launcher cannot go on in the background.
    """
    inherited = environ.pop(_VARIABLE, None)
    if inherited is not None:
        launcher = _inherited_launcher(inherited)
        launcher.on_alive()
        return run(launcher)
    if os.getpid() == 1:
        raise ConfigError(
            f"{Opt.DETACH}: this is the first process of a container, which ends with it",
            hint=f"leave out {Opt.DETACH}: the container can run in the background",
        )
    if (warning := check_scheduler(environ, has_terminal=os.isatty(0))) is not None:
        warn(warning)
    rule = logind.read_logout_rule(environ)
    command = _fork(in_scope=rule.has_scopes)
    if isinstance(command, DetachedLauncher):
        return run(command)
    code = command.wait()
    in_scope = rule.has_scopes and command.has_launcher
    if rule.has_scopes and not command.has_launcher:
        if command.signal is not None:  # systemd-run was stopped, not refused
            return 128 + command.signal
        command = _fork(in_scope=False)
        if isinstance(command, DetachedLauncher):
            return run(command)
        code = command.wait()
    if code == 0 and command.run_dir is not None:
        if (warning := _logout_warning(rule, in_scope=in_scope)) is not None:
            warn(warning)
        name = os.path.basename(command.run_dir)
        say(
            f"job {name} goes on in the background; distlaunch attach {name} shows its console, "
            f"and distlaunch status {name} whether it runs"
        )
        sys.stdout.write(f"{name}\n")
    return code


def check_planned(planned: Planned) -> None:
    """Raise ConfigError if another launcher has started this one, and would take its end for the
    end of its worker."""
    if planned.join is not None:
        raise ConfigError(
            f"{Opt.DETACH}: each node has a launcher of its own here, and whatever started them "
            "would take the job for ended",
            hint=f"leave out {Opt.DETACH}, and start the launchers in the background yourself",
        )
    if planned.plan.outer is not None:
        raise ConfigError(
            f"{Opt.DETACH}: this launcher is a worker of {planned.plan.outer.launcher}, which would "
            "take the worker for ended"
        )


def credential_warnings(options: TrainOptions, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each credential that the job may need later and that disappears at
    logout: a forwarded SSH agent, a forwarded Kerberos ticket.

    Yields nothing if the job never connects again, or was not started over SSH.
    """
    may_connect_again = (
        options.max_restarts > 0
        or options.spares
        or options.discover is not None
        or isinstance(options.num_nodes, tuple)
    )
    if not may_connect_again or "SSH_CONNECTION" not in environ:
        return
    if environ.get("SSH_AUTH_SOCK") and options.ssh_key is None:
        yield (
            "the forwarded SSH agent goes at logout: after that a lost node cannot be connected "
            f"again with its keys; {Opt.SSH_KEY('FILE')} uses a key of this host"
        )
    if environ.get("KRB5CCNAME"):
        yield (
            "the forwarded Kerberos ticket goes at logout: after that the job has no access to "
            "what needs it"
        )


def check_scheduler(environ: Mapping[str, str], *, has_terminal: bool) -> str | None:
    """Return a warning if a scheduler will end the job later; None if not.

    ``has_terminal``: the command was typed in a shell. Raises ConfigError if the job of the
    scheduler would end with the command.
    """
    for system, marker, is_script in _SCHEDULERS:
        if not environ.get(marker):
            continue
        if is_script(environ):
            raise ConfigError(
                f"{Opt.DETACH}: the {system} job ends when its script has ended, and would end the "
                "workers",
                hint=f"leave out {Opt.DETACH}: the job of the scheduler is in the background already",
            )
        if environ.get("SLURM_STEP_ID", _INTERACTIVE_STEP) != _INTERACTIVE_STEP:
            if not has_terminal:
                raise ConfigError(
                    f"{Opt.DETACH}: the Slurm step ends when its tasks have ended, and would end the "
                    "workers",
                    hint=f"leave out {Opt.DETACH}",
                )
            return "the job ends with the Slurm step of this shell, at the latest"
        return f"the job ends with {system} job {environ[marker]}, at the latest"
    return None


def _is_slurm_script(environ: Mapping[str, str]) -> bool:
    return "SLURMD_NODENAME" in environ and "SLURM_STEP_ID" not in environ


_SCHEDULERS: tuple[tuple[str, str, Callable[[Mapping[str, str]], bool]], ...] = (
    # name, variable with the id of the job, whether a script of the job runs
    ("Slurm", "SLURM_JOB_ID", _is_slurm_script),
    ("PBS", "PBS_JOBID", lambda environ: environ.get("PBS_ENVIRONMENT") == "PBS_BATCH"),
    ("LSF", "LSB_JOBID", lambda environ: not environ.get("LSB_INTERACTIVE")),
    ("Grid Engine", "JOB_SCRIPT", lambda environ: environ.get("ENVIRONMENT") == "BATCH"),
)


def _logout_warning(rule: logind.LogoutRule, *, in_scope: bool) -> str | None:
    """Return a warning if the end of the login session ends the job."""
    if not rule.kills_session or (in_scope and rule.lingers):
        return None
    if in_scope:
        return "your last logout ends the job; loginctl enable-linger prevents that"
    return (
        "the end of this session ends the job, because logind kills its processes "
        "(KillUserProcesses=yes)"
    )


# --- the command


class _Command:
    """The command's side: it shows the console, and waits."""

    def __init__(self, pid: int, status: int, early: int) -> None:
        self._pid = pid
        self._status = status
        self._console = early
        self._shown = 0
        self.has_launcher = False
        """The launcher has sent a message."""
        self.signal: int | None = None
        """The newest signal that has been passed on."""
        self.run_dir: str | None = None
        self._has_started = False

    def wait(self) -> int:
        """Return 0 if all workers have started, else the exit code of the launcher.

        Signals are passed on to the launcher meanwhile.
        """
        before = {number: signal.getsignal(number) for number in _FORWARDED}
        for number, handler in before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, self._forward)
        try:
            self._read_messages()
            self._show()
            if self._has_started:
                return 0
            _, ended = os.waitpid(self._pid, 0)
            self._show()
            code = os.waitstatus_to_exitcode(ended)
            return code if code >= 0 else 128 - code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._status)
            os.close(self._console)

    def _forward(self, number: int, _: object) -> None:
        self.signal = number
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def _read_messages(self) -> None:
        received = b""
        while not self._has_started:
            if select.select([self._status], [], [], _POLL_S)[0]:
                block = os.read(self._status, _BLOCK)
                if not block:
                    return
                *lines, received = (received + block).split(b"\n")
                for line in lines:
                    self._on_message(json.loads(line))
            self._show()

    def _on_message(self, message: Mapping[str, Any]) -> None:
        self.has_launcher = True
        match message:
            case {"run_dir": str(path)}:
                self.run_dir = path
                console = os.open(
                    os.path.join(path, CONSOLE), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
                )
                os.close(self._console)
                self._console = console  # begins with the same bytes as the early file
            case {"started": True}:
                self._has_started = True
            case _:
                return

    def _show(self) -> None:
        """Write to stderr what the console has got."""
        with suppress(OSError):
            while block := os.pread(self._console, _BLOCK, self._shown):
                self._shown += len(block)
                os.write(STDERR, block)


def _fork(*, in_scope: bool) -> DetachedLauncher | _Command:
    """Fork. Return ``DetachedLauncher`` in the child, and ``_Command`` in the parent.

    With ``in_scope`` the child does not return: systemd-run starts the same command line again.
    Raises ConfigError.
    """
    early = os.memfd_create("console", os.MFD_CLOEXEC)
    read, write = os.pipe2(os.O_CLOEXEC)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        pid = os.fork()
    except OSError as exc:
        raise ConfigError(f"cannot start a process: {os.strerror(exc.errno or 0)}") from exc
    if pid:
        os.close(write)
        return _Command(pid, read, early)
    os.close(read)
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.close(null)
    for number in (STDOUT, STDERR):
        os.dup2(early, number)
    if not in_scope:
        return DetachedLauncher(write, early)
    for number in (write, early):
        os.set_inheritable(number, True)  # noqa: FBT003 - positional-only in the standard library
    words = (*logind.SCOPE, "--", *sys.orig_argv)
    try:
        os.execvpe(words[0], words, {**os.environ, _VARIABLE: f"{write},{early}"})
    finally:
        os._exit(EXIT_SOFTWARE)


def _inherited_launcher(value: str) -> DetachedLauncher:
    """Return the side of a launcher that systemd-run has started. Raise ConfigError if the
    descriptors are not there."""
    try:
        status, early = map(int, value.split(","))
        modes = [os.fstat(number).st_mode for number in (status, early)]
    except (ValueError, OSError):
        status, early, modes = -1, -1, []
    if not modes or not stat.S_ISFIFO(modes[0]) or not stat.S_ISREG(modes[1]):
        raise ConfigError(
            f"{_VARIABLE} has no descriptors of a launcher", hint=f"unset {_VARIABLE}"
        )
    for number in (status, early):
        os.set_inheritable(number, False)  # noqa: FBT003 - positional-only in the standard library
    return DetachedLauncher(status, early)
