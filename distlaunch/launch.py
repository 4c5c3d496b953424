"""Layer launch: the composition root. Facts are read here, once; then plan, run, exit code."""

from __future__ import annotations

import importlib
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

from distlaunch.backends.registry import find_backend
from distlaunch.core.agent.ports import hold_port
from distlaunch.core.agent.spawner import start_spawner
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.gpus import GpuInventory
from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.record import replace
from distlaunch.core.probe.cpus import probe_cpus
from distlaunch.job.policy import JobPolicy, PolicySettings
from distlaunch.job.records import EventLog, OutputFiles
from distlaunch.job.rundir import RunDir, default_log_dir, make_run_dir, new_job_id
from distlaunch.job.runner import Clock, Runner, Terminal
from distlaunch.job.signals import SignalPipe
from distlaunch.job.sink import Sink
from distlaunch.job.transport.local import LocalTransport
from distlaunch.resolve.facts import Facts, PathKind
from distlaunch.resolve.options import TrainOptions
from distlaunch.resolve.plan import build_plan, script_places
from distlaunch.resolve.sources.local import local_topology

_DESCRIPTORS_PER_WORKER = 6  # at most, while one is being started; then 3
_DESCRIPTORS_OF_OUR_OWN = 64
_ENV_FILE_BYTES = 4 << 20
_SCHEDULERS = ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
_JOB_ID_LENGTH = 100
_HOUSEKEEPING_S = 0.25
_PRUNE_S = 5.0

OpenSink = Callable[[int], Sink]
"""Opens the console for a world size."""
OpenTerminal = Callable[[], Terminal | None]
"""Gives the user's terminal if the one worker can have it."""


def read_facts(options: TrainOptions, environ: Mapping[str, str]) -> Facts:
    """Read what resolving may need of this machine. Raises ConfigError for a file that cannot be read."""
    cwd = _cwd()
    workdir = os.path.join(cwd, options.workdir or "")
    wanted = {workdir.rstrip("/") or "/", *((os.path.join(cwd, options.workdir),) if options.workdir else ())}
    programs: dict[str, str | None] = {}
    if options.script is not None and not options.module:
        places = script_places(options.script, cwd, os.path.join(cwd, options.workdir or ""))
        wanted |= {*places, os.path.join(places[0], "__main__.py")}
        if options.no_python:
            programs[options.script] = _find_program(options.script, workdir, environ)
    if options.python is not None:
        programs[options.python] = _find_program(options.python, workdir, environ)
    return Facts(
        environ=dict(environ),
        cwd=cwd,
        hostname=socket.gethostname(),
        python=sys.executable,
        cpus=probe_cpus(),
        gpus=_gpus(options, environ),
        paths={path: _kind_of(path) for path in wanted},
        texts={path: _read_text(path) for path in options.env_file},
        programs=programs,
    )


def _cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError as exc:
        raise ConfigError("the current directory no longer exists", hint="cd to one that does") from exc


def _gpus(options: TrainOptions, environ: Mapping[str, str]) -> GpuInventory:
    on_cpu = options.device == "cpu" or (
        options.device == "auto" and (options.num_procs is not None or options.procs_per_node is not None)
    )
    if on_cpu and options.gpus is None:
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
            return file.read(_ENV_FILE_BYTES)
    except OSError as exc:
        raise ConfigError(f"--env-file {path}: {os.strerror(exc.errno or 0)}") from exc


def _job_id(options: TrainOptions) -> str:
    if options.job_id is None:
        return new_job_id(time.time(), os.urandom(3))
    bad = next((letter for letter in options.job_id if not (letter.isalnum() or letter in "._-:+@=,")), None)
    if bad is not None or not options.job_id.strip(".") or len(options.job_id) > _JOB_ID_LENGTH:
        why = f"{bad!r} is not allowed" if bad else "not usable as a folder's name"
        raise ConfigError(f"--job-id {options.job_id!r}: {why}", hint="letters, digits and ._-:+@=, (at most 100)")
    return options.job_id


def make_plan(options: TrainOptions, environ: Mapping[str, str]) -> LaunchPlan:
    """Plan without touching anything: what ``plan`` and ``--dry-run`` show."""
    facts = read_facts(options, environ)
    backend = find_backend(options.backend)
    topology = local_topology(options, facts)
    job_id = _job_id(options)
    base = os.path.abspath(options.log_dir) if options.log_dir else default_log_dir(dict(environ))
    return build_plan(options, facts, topology, backend, job_id=job_id, run_dir=os.path.join(base, job_id))


def run_job(
    options: TrainOptions, environ: Mapping[str, str], *, open_sink: OpenSink, open_terminal: OpenTerminal
) -> int:
    """Run a whole job on this machine; return the exit code of the launcher. Raises LaunchError before the start."""
    plan = make_plan(options, environ)
    terminal = open_terminal() if plan.world_size == 1 else None
    sink = open_sink(plan.world_size)
    nofile = _allow_descriptors(plan.world_size)
    if plan.wanted_port:
        hold_port(
            plan.wanted_port, owner=plan.job_id
        ).release()  # refused here, nothing is left; held by the agent later
    run_dir = make_run_dir(options.log_dir, plan.job_id, dict(environ))
    if run_dir.path != plan.run_dir:
        plan = replace(plan, run_dir=run_dir.path, env={**plan.env, "DISTLAUNCH_RUN_DIR": run_dir.path})
    try:
        return _run(options, plan, run_dir, nofile=nofile, environ=environ, sink=sink, terminal=terminal)
    finally:
        run_dir.close()


def _allow_descriptors(workers: int) -> int:
    """Raise our own limit of open files as far as the job needs; give the soft limit that we found."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = workers * _DESCRIPTORS_PER_WORKER + _DESCRIPTORS_OF_OUR_OWN
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise ConfigError(
                f"{workers} workers need {needed} open files, the limit is {hard}", hint="raise it: ulimit -Hn"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return soft


def _run(
    options: TrainOptions,
    plan: LaunchPlan,
    run_dir: RunDir,
    *,
    nofile: int,
    environ: Mapping[str, str],
    sink: Sink,
    terminal: Terminal | None,
) -> int:
    spawner = start_spawner(orphan_grace_s=options.failure_grace)  # before the first thread
    signal_pipe = SignalPipe()
    clock = Clock()
    events = EventLog(run_dir.events, sink)
    files = OutputFiles(plan.run_dir, sink, lambda text: sink.say(text, level="warning"))
    cookie = os.urandom(8).hex()
    transport = LocalTransport(
        job_id=plan.job_id, cookie=cookie, nofile=nofile, spawner=spawner, taker=files, clock=clock
    )
    policy = JobPolicy(_policy_settings(options, plan, environ, terminal=terminal is not None))
    runner = Runner(
        plan=plan,
        policy=policy,
        transport=transport,
        files=files,
        sink=sink,
        events=events,
        signal_pipe=signal_pipe,
        clock=clock,
        terminal=terminal,
    )
    workers = "1 worker" if plan.world_size == 1 else f"{plan.world_size} workers"
    sink.say(f"job {plan.job_id}: {workers} on {plan.nodes[0].host}; logs: {plan.run_dir}")
    for note in plan.notes:
        sink.say(note)
    run_dir.link_latest()
    housekeeping = _Housekeeping(run_dir)
    if run_dir.temporary:
        sink.say(f"the log directory cannot be written; this job's logs: {run_dir.path}", level="warning")
    events.write("job_started", {"job_id": plan.job_id, "world_size": plan.world_size, "backend": plan.backend})
    code: int | None = None
    try:
        housekeeping.start()
        if terminal is not None:
            terminal.take()
        code = runner.run()
    finally:
        transport.close()
        housekeeping.finish()
        if terminal is not None:
            terminal.give_back()
        signal_pipe.close()
        sink.close(timeout_s=None if code == 0 else options.failure_grace)
    return code


class _Housekeeping(threading.Thread):
    """Does beside the loop what can wait until the workers have started: they need the CPUs first."""

    def __init__(self, run_dir: RunDir) -> None:
        super().__init__(name="housekeeping", daemon=True)
        self._run_dir = run_dir
        self._ending = threading.Event()

    def run(self) -> None:
        """Prune old runs, which may be large and on a slow file system; load what explains a failure."""
        over = self._ending.wait(_HOUSEKEEPING_S)
        self._run_dir.prune()
        for name in () if over else ("judge", "report"):
            importlib.import_module(f"distlaunch.job.diagnose.{name}")

    def finish(self) -> None:
        """Do it now, if the job was shorter than the wait; bounded, as it is not what the user waits for."""
        self._ending.set()
        self.join(timeout=_PRUNE_S)


def _policy_settings(
    options: TrainOptions, plan: LaunchPlan, environ: Mapping[str, str], *, terminal: bool
) -> PolicySettings:
    first_ranks, rank = [], 0
    for node in plan.nodes:
        first_ranks.append(rank)
        rank += node.slots
    return PolicySettings(
        hosts=tuple(node.host for node in plan.nodes),
        first_ranks=tuple(first_ranks),
        world_size=plan.world_size,
        python=None if options.no_python else options.python or sys.executable,
        master_port=plan.wanted_port,
        max_restarts=options.max_restarts,
        restart_window_s=options.restart_window,
        min_uptime_s=options.min_uptime,
        grace_s=options.grace,
        failure_grace_s=options.failure_grace,
        terminal=terminal,
        repeated_term_kills=not any(name in environ for name in _SCHEDULERS),
    )
