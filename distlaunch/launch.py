"""Layer launch: the composition root. Facts are read here, once; then plan, run, exit code."""

from __future__ import annotations

import importlib
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

from distlaunch.backends.registry import find_backend
from distlaunch.core.agent.channel import Channel
from distlaunch.core.agent.ports import hold_port
from distlaunch.core.agent.spawner import start_spawner
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.gpus import GpuInventory
from distlaunch.core.model.layout import STDERR, STDOUT
from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.record import replace
from distlaunch.core.model.text import counted, printable, quoted
from distlaunch.core.model.topology import Topology
from distlaunch.core.probe.cpus import probe_cpus
from distlaunch.core.wire.spawning import FromSpawner
from distlaunch.job.filters import LineFilter
from distlaunch.job.policy import JobPolicy
from distlaunch.job.records import EventLog, OutputFiles
from distlaunch.job.rundir import LATEST, RunDir, folder_name, log_base, make_run_dir, new_job_id
from distlaunch.job.runner import Clock, Runner, Terminal
from distlaunch.job.settings import PolicySettings
from distlaunch.job.signals import SignalPipe
from distlaunch.job.sink import Sink
from distlaunch.job.transport.local import LocalTransport
from distlaunch.resolve.facts import Facts, PathKind
from distlaunch.resolve.options import TorchrunOptions, TrainOptions
from distlaunch.resolve.plan import build_plan, script_places
from distlaunch.resolve.sources.local import local_topology
from distlaunch.resolve.sources.torchrun import torchrun_topology

_DESCRIPTORS_PER_WORKER = 9  # at most, while one is being started; then 4, or 5 while stacks are taken
_DESCRIPTORS_OF_OUR_OWN = 64
_ENV_FILE_CHARS = 4 << 20
_SCHEDULERS = ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
_JOB_ID_BYTES = 100
_HOUSEKEEPING_S = 0.25
CONSOLE_CLOSE_S = 10.0
"""How long a pipe may stand still at the end of a job that failed or was stopped, before its rest is given up."""
_LATE_CLOSE_S = 1.0
_PRUNE_S = 5.0

OpenSink = Callable[[int], Sink]
"""Opens the console for a world size."""
OpenTerminal = Callable[[], Terminal | None]
"""Gives the user's terminal if the one worker can have it."""
OpenFilters = Callable[[int], Mapping[int, LineFilter]]
"""Gives for a world size what picks lines of stdout (1) and stderr (2) into a file."""


def read_facts(options: TrainOptions, environ: Mapping[str, str]) -> Facts:
    """Read what resolving may need of this machine. Raises ConfigError for a file that cannot be read."""
    cwd = _cwd()
    workdir = cwd if options.workdir is None else os.path.join(cwd, options.workdir)
    wanted = {workdir}
    programs: dict[str, str | None] = {}
    if options.script is not None and not options.module:
        places = script_places(options.script, cwd, workdir)
        wanted |= {*places, os.path.join(places[0], "__main__.py")}
        if options.no_python:
            programs[options.script] = _find_program(options.script, workdir, environ)
    if options.python is not None:
        programs[options.python] = _find_program(options.python, workdir, environ)
    return Facts(
        environ=dict(environ),
        cwd=cwd,
        hostname=printable(socket.gethostname()) or "localhost",
        python=sys.executable,
        cpus=probe_cpus(topology=options.bind != "none"),
        gpus=_gpus(options, environ),
        columns=_columns(),
        paths={path: _kind_of(path) for path in wanted},
        texts={path: _read_text(path) for path in options.env_file},
        programs=programs,
    )


def _cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError as exc:
        raise ConfigError("the current directory no longer exists", hint="cd to one that does") from exc


def _columns() -> int | None:
    """Give the width of the terminal that shows our output, if one does."""
    try:
        return os.get_terminal_size(STDOUT).columns or None
    except OSError:
        return None


def _gpus(options: TrainOptions, environ: Mapping[str, str]) -> GpuInventory:
    if not options.needs_gpus:
        return GpuInventory()
    from distlaunch.core.probe.gpus import probe_gpus

    return probe_gpus(environ=environ)


def _kind_of(path: str) -> PathKind:
    try:
        if os.path.isdir(path):
            return "directory"
        if not os.path.exists(path):
            return "missing"
    except ValueError:  # a NUL in the name
        return "missing"
    return "file" if os.access(path, os.R_OK) else "unreadable"


def _find_program(name: str, workdir: str, environ: Mapping[str, str]) -> str | None:
    if os.sep in name:
        path = os.path.join(workdir, name)
        return path if os.path.isfile(path) and os.access(path, os.X_OK) else None
    import shutil

    return shutil.which(name, path=environ.get("PATH"))


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            text = file.read(_ENV_FILE_CHARS + 1)
    except OSError as exc:
        raise ConfigError(f"--env-file {printable(path)}: {os.strerror(exc.errno or 0)}") from exc
    if len(text) > _ENV_FILE_CHARS:
        raise ConfigError(f"--env-file {printable(path)}: over 4 MiB, which is more than an environment can be")
    return text


def _job_id(options: TrainOptions) -> str:
    if isinstance(options, TorchrunOptions):
        run_id = options.dialect.run_id or new_job_id(time.time(), os.urandom(3))
        return folder_name(run_id, os.urandom(4))
    if options.job_id is None:
        return new_job_id(time.time(), os.urandom(3))
    bad = next((letter for letter in options.job_id if not (letter.isalnum() or letter in "._-:+@=,")), None)
    unusable = not options.job_id.strip(".") or options.job_id == LATEST or options.job_id.startswith("-")
    if bad is not None or unusable or len(os.fsencode(options.job_id)) > _JOB_ID_BYTES:
        why = f"{bad!r} is not allowed" if bad else "not usable as a folder's name"
        raise ConfigError(
            f"--job-id {options.job_id!r}: {why}", hint="letters, digits and ._-:+@=, (at most 100 bytes)"
        )
    return options.job_id


def make_plan(options: TrainOptions, environ: Mapping[str, str]) -> LaunchPlan:
    """Plan without touching anything: what ``plan`` and ``--dry-run`` show."""
    facts = read_facts(options, environ)
    backend = find_backend(options.backend)
    topology = _topology(options, facts)
    _check_descriptors(topology.world_size)
    job_id = _job_id(options)
    base = log_base(options.log_dir, environ) or "a temporary directory"
    plan = build_plan(options, facts, topology, backend, job_id=job_id, run_dir=os.path.join(base, job_id))
    if plan.preload and options.setup is None:  # which may lead to others
        _check_modules(plan, options)
    return plan


def _check_modules(plan: LaunchPlan, options: TrainOptions) -> None:
    """Refuse ``--preload`` of what is not there. Raises ConfigError."""
    from distlaunch.core.probe.modules import is_importable, nearest_module

    script = os.path.join(plan.workdir, plan.argv[1])
    first = plan.workdir if options.module else script if os.path.isdir(script) else os.path.dirname(script)
    path = [first, *filter(None, {**plan.base_env, **plan.given_env}.get("PYTHONPATH", "").split(os.pathsep))]
    for name in plan.preload:
        top = name.partition(".")[0]
        if not is_importable(top, path):
            near = nearest_module(top, path)
            hint = f"did you mean {near}?" if near else f"{plan.argv[0]} -m pip install {quoted(top)}"
            raise ConfigError(f"preload {quoted(name)}: {plan.argv[0]} has no such module", hint=hint)


def _topology(options: TrainOptions, facts: Facts) -> Topology:
    """Decide how many workers run where, by the rules of the command that asks."""
    return torchrun_topology(options, facts) if isinstance(options, TorchrunOptions) else local_topology(options, facts)


def run_job(
    options: TrainOptions,
    environ: Mapping[str, str],
    *,
    open_sink: OpenSink,
    open_terminal: OpenTerminal,
    open_filters: OpenFilters | None = None,
) -> int:
    """Run a whole job on this machine; return the exit code of the launcher. Raises LaunchError before the start."""
    plan = make_plan(options, environ)
    _check_proc()
    terminal = open_terminal() if plan.world_size == 1 else None
    sink = open_sink(plan.world_size)
    nofile = _allow_descriptors(plan.world_size)
    port = hold_port(plan.wanted_port, owner=plan.job_id)  # refused before anything is made
    run_dir = make_run_dir(options.log_dir, plan.job_id, environ)
    if run_dir.path != plan.run_dir:
        plan = replace(plan, run_dir=run_dir.path, env={**plan.env, "DISTLAUNCH_RUN_DIR": run_dir.path})
    clock = Clock()
    files = OutputFiles(
        plan.run_dir,
        sink,
        lambda text: sink.say(text, level="warning"),
        layout=plan.layout,
        ranks=range(plan.world_size),
        filters=open_filters(plan.world_size) if open_filters else None,
    )
    with ExitStack() as stack:
        stack.callback(run_dir.close)
        stack.callback(files.close)
        transport = LocalTransport(
            job_id=plan.job_id,
            cookie=os.urandom(8).hex(),
            nofile=nofile,
            spawner=_start_spawner(plan.job_id, options),  # before the first thread
            port=port,
            taker=files,
            clock=clock,
        )
        housekeeping = _Housekeeping(run_dir)
        stack.callback(housekeeping.finish)
        signal_pipe = SignalPipe()
        ended = stack.enter_context(_closed_console(sink, signal_pipe))
        if terminal is not None:
            stack.callback(terminal.give_back)
        stack.callback(transport.close)
        runner = Runner(
            plan=plan,
            policy=JobPolicy(_policy_settings(options, plan, environ, terminal=terminal is not None)),
            run_dir=run_dir,
            transport=transport,
            files=files,
            sink=sink,
            events=EventLog(run_dir.events, sink),
            signal_pipe=signal_pipe,
            clock=clock,
            terminal=terminal,
            takes_typed=options.dialect.takes_typed,
        )
        run_dir.link_latest()
        if run_dir.temporary:
            sink.say(f"the log directory cannot be written; this job's logs: {run_dir.path}", level="warning")
        elif os.path.basename(run_dir.path) != plan.job_id:
            sink.say(f"there are logs of a job {plan.job_id} already; this one's: {run_dir.path}", level="warning")
        housekeeping.start()
        code = runner.run()
        ended.append(code)
    return code


def _check_proc() -> None:
    """Refuse to run on a /proc that is missing or another PID namespace's: we would look for, and kill, strangers."""
    try:
        seen = os.readlink("/proc/self")
    except OSError as exc:
        raise ConfigError("/proc is not mounted here", hint="mount -t proc proc /proc") from exc
    if seen != str(os.getpid()):
        raise ConfigError("/proc belongs to another PID namespace", hint="mount it anew, as unshare --mount-proc does")


def _start_spawner(job_id: str, options: TrainOptions) -> tuple[Channel[FromSpawner], int]:
    try:
        return start_spawner(job_id=job_id, orphan_grace_s=options.failure_grace)
    except OSError as exc:
        why = os.strerror(exc.errno or 0)
        raise ConfigError(f"no process can be started: {why}", hint="see the limits: ulimit -u, ulimit -n") from exc


@contextmanager
def _closed_console(sink: Sink, signal_pipe: SignalPipe) -> Iterator[list[int]]:
    """Close the console at the end: after exit code 0 however slow its pipe is, otherwise while that moves at all.

    From here on signals do what they do by default, for there is nothing left to wind up; also one that came too late
    for the job and was not read.
    """
    ended: list[int] = []
    try:
        yield ended
    finally:
        late = signal_pipe.close()
        lost = sink.close(timeout_s=_LATE_CLOSE_S if late else None if ended == [0] else CONSOLE_CLOSE_S)
        if lost and select.select([], [STDERR], [], 0)[1]:
            with suppress(OSError):
                os.write(STDERR, f"distlaunch: {lost} bytes of output could not be shown\n".encode())
        if late:
            signal.raise_signal(late[0])


def _check_descriptors(workers: int) -> int:
    """Give how many open files we need. Raises ConfigError if that is over the hard limit."""
    needed = workers * _DESCRIPTORS_PER_WORKER + _DESCRIPTORS_OF_OUR_OWN
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{counted(workers, 'worker')} would need {needed} open files, the limit is {hard}", hint="see ulimit -Hn"
        )
    return needed


def _allow_descriptors(workers: int) -> int:
    """Raise our own limit of open files as far as the job needs; give the soft limit that we found."""
    needed = _check_descriptors(workers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return soft


class _Housekeeping(threading.Thread):
    """Does beside the loop what can wait until the workers have started: they need the CPUs first."""

    def __init__(self, run_dir: RunDir) -> None:
        super().__init__(name="housekeeping", daemon=True)
        self._run_dir = run_dir
        self._ending = threading.Event()

    def run(self) -> None:
        """Prune old runs, which may be on a slow file system; load what explains a failure."""
        over = self._ending.wait(_HOUSEKEEPING_S)
        self._run_dir.prune()
        for name in () if over else ("judge", "report"):
            importlib.import_module(f"distlaunch.job.diagnose.{name}")

    def start(self) -> None:
        """Start, unless the user may start no more threads: nothing of this is needed."""
        with suppress(RuntimeError):
            super().start()

    def finish(self) -> None:
        """Do it now, if the job was shorter than the wait; bounded, as it is not what the user waits for."""
        self._ending.set()
        if self.is_alive():
            self.join(timeout=_PRUNE_S)


def _script_dir(options: TrainOptions, plan: LaunchPlan) -> str:
    """Name the folder of the user's own code: the script's, else the workers' directory."""
    script = "" if options.module or options.no_python else options.script or ""
    found = next((word for word in plan.argv[1:] if script and word.endswith(script)), "")
    return os.path.dirname(os.path.join(plan.workdir, found))


def _policy_settings(
    options: TrainOptions, plan: LaunchPlan, environ: Mapping[str, str], *, terminal: bool
) -> PolicySettings:
    return PolicySettings(
        hosts=tuple(node.host for node in plan.nodes),
        first_ranks=plan.first_ranks,
        world_size=plan.world_size,
        python=None if options.no_python else options.python or sys.executable,
        master_port=plan.wanted_port,
        max_restarts=options.max_restarts,
        restart_window_s=options.restart_window,
        min_uptime_s=options.min_uptime,
        grace_s=options.grace,
        failure_grace_s=options.failure_grace,
        hang_timeout_s=options.hang_timeout,
        script_dir=_script_dir(options, plan),
        terminal=terminal,
        dialect=options.dialect,
        repeated_term_kills=not any(name in environ for name in _SCHEDULERS),
    )
