"""What all ways to run a job need of the launcher's process: checks, limits, spawner, console,
housekeeping, policy settings."""

from __future__ import annotations

import errno
import importlib
import os
import resource
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from distlaunch.coordinator.policy.job_settings import NodeSetupSettings, PolicySettings, Scheduler
from distlaunch.coordinator.runtime.run_directory import RunDir
from distlaunch.coordinator.runtime.signal_pipe import LOOK_S, SignalPipe
from distlaunch.coordinator.runtime.sink import Sink
from distlaunch.core.agent.workers.channel import Channel
from distlaunch.core.agent.workers.spawner import start_spawner
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.run_files import STDERR
from distlaunch.core.probe.process_limits import explain_refusal
from distlaunch.core.protocol.spawner_messages import FromSpawner
from distlaunch.launch.make_plan import needed_descriptors
from distlaunch.planning.backend import PlannedBackend
from distlaunch.planning.clusters.select import has_markers
from distlaunch.planning.train_options import TrainOptions

if TYPE_CHECKING:
    from distlaunch.coordinator.runtime.control import ControlServer
    from distlaunch.coordinator.runtime.runner import Runner

_HOUSEKEEPING_S = 0.25
CONSOLE_CLOSE_S = 10.0
"""How long a blocked pipe may hold up the end of a failed or stopped job. The rest of the output is
then dropped."""
_PRUNE_S = 5.0


def check_system() -> None:
    """Raise ConfigError if /dev/null or /proc is missing, or if /proc is another PID namespace's.

    With a foreign /proc the launcher would kill unrelated processes.
    """
    try:
        os.close(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
    except OSError as exc:
        raise ConfigError(
            f"{os.devnull} cannot be opened: {os.strerror(exc.errno or 0)}",
            hint="mknod -m 666 /dev/null c 1 3, or run the container with its usual /dev",
        ) from exc
    try:
        seen = os.readlink("/proc/self")
    except OSError as exc:
        raise ConfigError("/proc is not mounted here", hint="mount -t proc proc /proc") from exc
    if seen != str(os.getpid()):
        raise ConfigError(
            "/proc belongs to another PID namespace",
            hint="mount /proc again, as unshare --mount-proc does",
        )


def new_spawner(
    job_id: str, options: TrainOptions, *, terminal: int = -1
) -> tuple[Channel[FromSpawner], int]:
    """Fork the spawner, the parent of the workers. Must be called before the first thread starts.

    ``terminal`` is the user's terminal if the spawner has to set its modes. Raises ConfigError.
    """
    try:
        return start_spawner(job_id=job_id, orphan_grace_s=options.failure_grace, terminal=terminal)
    except OSError as exc:
        why = os.strerror(exc.errno or 0)
        files = exc.errno in {errno.EMFILE, errno.ENFILE}
        hint = "the limit of open files is reached: see ulimit -n" if files else explain_refusal()
        raise ConfigError(f"cannot start a process: {why}", hint=hint) from exc


@contextmanager
def closed_console(sink: Sink, signal_pipe: SignalPipe) -> Iterator[list[int]]:
    """Yield an empty list, to which the caller appends the job's exit code, and close the console
    at the end.

    After exit code 0, closing waits until all has been read. After a failure, it waits while the
    reader goes on. A signal ends the wait and changes nothing else.
    """
    ended: list[int] = []
    try:
        yield ended
    finally:
        timeout_s = None if ended[-1:] == [0] else CONSOLE_CLOSE_S
        lost = sink.close(timeout_s=timeout_s, hurried=signal_pipe.is_hurried)
        if lost and select.select([], [STDERR], [], 0)[1]:
            with suppress(OSError):
                os.write(
                    STDERR, f"distlaunch: {lost} bytes of output could not be shown\n".encode()
                )


def allow_descriptors(workers: int) -> int:
    """Raise the limit of open files as far as the job needs. Return the original soft limit.

    Raises ConfigError above the hard limit.
    """
    needed = needed_descriptors(workers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return soft


class Housekeeping(threading.Thread):
    """A thread for work that must not delay the start: control server, pruning, imports."""

    def __init__(self, run_dir: RunDir) -> None:
        super().__init__(name="housekeeping", daemon=True)
        self._run_dir = run_dir
        self._runner: Runner | None = None
        self._control: ControlServer | None = None
        self._ending = threading.Event()

    def run(self) -> None:
        """Start the control server after a short delay, prune old runs, which may be on a slow file
        system, and load the modules that explain a failure.

        If the job has ended before, only prune.
        """
        over = self._ending.wait(_HOUSEKEEPING_S)
        if not over and self._runner is not None:
            from distlaunch.coordinator.runtime.control import ControlServer

            runner = self._runner
            control = ControlServer(
                self._run_dir.path, runner.calls, runner.handlers(), runner.advisory
            )
            control.start()
            if not control.path:
                runner.calls.call(runner.warn_of_no_control_socket)
            self._control = control  # only now: ``finish`` may close it at any time
        self._run_dir.prune()
        for name in () if over else ("first_cause", "report"):
            importlib.import_module(f"distlaunch.diagnosis.{name}")

    def start_for(self, runner: Runner) -> None:
        """Start the thread for a job. Without it, the job has no control socket and prunes no
        runs."""
        self._runner = runner
        with suppress(RuntimeError):
            self.start()

    def finish(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """Let the thread begin if it still waits, close the control server, and wait for the
        thread, for up to 5 s."""
        self._ending.set()
        if self._control is not None:
            self._control.close()
        until = time.monotonic() + _PRUNE_S
        while self.is_alive() and not hurried() and (left_s := until - time.monotonic()) > 0:
            self.join(timeout=min(left_s, LOOK_S))
        if self._control is not None:  # the thread may have made it meanwhile
            self._control.close()


def _script_dir(options: TrainOptions, plan: LaunchPlan) -> str:
    """Return the directory of the script; the workers' directory if there is no script file."""
    script = "" if options.module or options.no_python else options.script or ""
    found = next((word for word in plan.argv[1:] if script and word.endswith(script)), "")
    return os.path.dirname(os.path.join(plan.workdir, found))


def policy_settings(
    options: TrainOptions,
    plan: LaunchPlan,
    environ: Mapping[str, str],
    *,
    backend: PlannedBackend,
    node_setup: NodeSetupSettings | None,
    scheduler: Scheduler | None,
    terminal: bool,
) -> PolicySettings:
    """Return the settings of the job's policy."""
    return PolicySettings(
        hosts=tuple(node.host for node in plan.nodes),
        first_ranks=plan.first_ranks,
        world_size=len(plan.workers),
        scheduler=scheduler,
        node_setup=node_setup,
        python=None if options.no_python else options.python or sys.executable,
        dashes_first=options.script_args[:1] == ("--",),
        adds_local_rank=any(word.startswith("--local_rank=") for word in backend.worker_words(0))
        or any(word.startswith("--local-rank=${") for word in options.script_args[:1]),
        master_port=plan.wanted_port,
        worker_ports=plan.worker_ports,
        uses_master_port=backend.uses_master_port,
        max_restarts=options.max_restarts,
        restart_window_s=options.restart_window,
        restart_delay_s=options.restart_delay or (0.0, 0.0),
        min_uptime_s=options.min_uptime,
        grace_s=options.grace,
        failure_grace_s=options.failure_grace,
        linger_s=options.failure_grace if options.linger is None else options.linger,
        hang_timeout_s=options.hang_timeout,
        hang_action=options.hang_action,
        hang_notice_s=options.hang_notice,
        script_dir=_script_dir(options, plan),
        terminal=terminal,
        repeated_term_kills=not has_markers(environ),
    )


def run_alone_hint(options: TrainOptions) -> str | None:
    """Return a hint on how to run here alone although a scheduler names other nodes.

    None if the user's command has no option for it.
    """
    name = options.named("source")
    return f"{name} flags runs on this machine alone" if name.startswith("--") else None


def warn_about_log_directory(run_dir: RunDir, job_id: str, sink: Sink) -> None:
    """Warn the user if the logs are not where they belong: in a temporary directory, or in one
    whose name is not the job's id, because that name was taken."""
    if run_dir.temporary:
        problem = "there is no home directory" if run_dir.instead_of is None else run_dir.instead_of
        sink.say(
            f"the log directory cannot be used ({problem}); this job's logs: {run_dir.path}",
            level="warning",
        )
    elif os.path.basename(run_dir.path) != job_id:
        sink.say(
            f"there are already logs of a job {job_id}; this job's logs: {run_dir.path}",
            level="warning",
        )
