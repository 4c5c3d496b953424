"""Layer launch: the composition root: plan, run, exit code."""

from __future__ import annotations

import importlib
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from distlaunch.core.agent.channel import Channel
from distlaunch.core.agent.ports import hold_port
from distlaunch.core.agent.spawner import start_spawner
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.layout import STDERR
from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.record import replace
from distlaunch.core.wire.spawning import FromSpawner
from distlaunch.job.filters import LineFilter
from distlaunch.job.keyboard import Terminal
from distlaunch.job.policy import JobPolicy
from distlaunch.job.records import EventLog, OutputFiles
from distlaunch.job.rundir import RunDir, make_run_dir
from distlaunch.job.runner import Clock, Files, Runner
from distlaunch.job.settings import PolicySettings
from distlaunch.job.signals import SignalPipe
from distlaunch.job.sink import Sink
from distlaunch.job.transport.local import LocalTransport
from distlaunch.planning import Planned, make_plan, needed_descriptors
from distlaunch.resolve.options import TrainOptions
from distlaunch.resolve.select import hints

_HOUSEKEEPING_S = 0.25
CONSOLE_CLOSE_S = 10.0
"""How long a pipe may stand still at the end of a job that failed or was stopped, before its rest is given up."""
_LATE_CLOSE_S = 1.0
_PRUNE_S = 5.0

if TYPE_CHECKING:
    from distlaunch.job.fleet import Fleet
    from distlaunch.launch_nodes import Nodes
    from distlaunch.launch_slurm import Site

OpenSink = Callable[[int], Sink]
"""Opens the console for a world size."""
OpenTerminal = Callable[[], Terminal | None]
"""Gives the user's terminal if the one worker can have it."""
OpenFilters = Callable[[int], Mapping[int, LineFilter]]
"""Gives for a world size what picks lines of stdout (1) and stderr (2) into a file."""


def run_job(
    options: TrainOptions,
    environ: Mapping[str, str],
    *,
    open_sink: OpenSink,
    open_terminal: OpenTerminal,
    open_filters: OpenFilters | None = None,
) -> int:
    """Run a whole job; return the exit code of the launcher. Raises LaunchError before the start."""
    planned = make_plan(options, environ)
    site = _site(planned, options, environ)
    nodes = _other_nodes(planned, options, environ, site)
    plan = planned.plan
    _check_proc()
    workers = len(plan.workers) if nodes is None else nodes.most_workers
    terminal = open_terminal() if workers == 1 and nodes is None else None
    sink = open_sink(workers)
    if planned.explanation is not None:
        sink.say("\n  ".join(["where this comes from:", *planned.explanation.lines()]))
    nofile = _allow_descriptors(workers if nodes is None else 0)
    port = hold_port(plan.wanted_port, owner=plan.job_id) if nodes is None else None  # refused before anything is made
    run_dir = make_run_dir(options.log_dir, plan.job_id, environ)
    if run_dir.path != plan.run_dir:
        plan = replace(plan, run_dir=run_dir.path, env={**plan.env, "DISTLAUNCH_RUN_DIR": run_dir.path})
    clock = Clock()
    files = OutputFiles(
        plan.run_dir,
        sink,
        lambda text: sink.say(text, level="warning"),
        layout=plan.layout,
        ranks=range(workers),
        filters=open_filters(workers) if open_filters else None,
    )
    with ExitStack() as stack:
        stack.callback(run_dir.close)
        stack.callback(files.close)
        transport: LocalTransport | Fleet
        filed: Files = files
        if nodes is None:
            transport = LocalTransport(
                job_id=plan.job_id,
                cookie=os.urandom(8).hex(),
                nofile=nofile,
                spawner=_start_spawner(plan.job_id, options),  # before the first thread
                port=port,
                taker=files,
                clock=clock,
            )
        else:
            transport = filed = nodes.fleet(files, clock, run_dir=run_dir.path)
        housekeeping = _Housekeeping(run_dir)
        stack.callback(housekeeping.finish)
        signal_pipe = SignalPipe()
        ended = stack.enter_context(_closed_console(sink, signal_pipe))
        if terminal is not None:
            stack.callback(terminal.give_back)
        settings = _policy_settings(options, plan, environ, nodes=nodes, site=site, terminal=terminal is not None)
        policy = JobPolicy(settings)
        if site is not None:
            stack.callback(lambda: ended.append(site.conclude(policy, ended[-1], sink)) if ended else None)
        stack.callback(transport.close)
        runner = Runner(
            plan=plan,
            policy=policy,
            run_dir=run_dir,
            transport=transport,
            files=filed,
            sink=sink,
            events=EventLog(run_dir.events, sink),
            signal_pipe=signal_pipe,
            clock=clock,
            terminal=terminal,
            takes_typed=options.dialect.takes_typed,
            feeder=None if nodes is None else nodes.feeder,
            node_logs=options.node_logs or "",
        )
        run_dir.link_latest()
        if run_dir.temporary:
            sink.say(f"the log directory cannot be written; this job's logs: {run_dir.path}", level="warning")
        elif os.path.basename(run_dir.path) != plan.job_id:
            sink.say(f"there are logs of a job {plan.job_id} already; this one's: {run_dir.path}", level="warning")
        for note in site.notes() if site is not None else _no_site(options):
            sink.say(note, level="warning")
        housekeeping.start()
        ended.append(runner.run())
    return ended[-1]


def _site(planned: Planned, options: TrainOptions, environ: Mapping[str, str]) -> Site | None:
    """Give the Slurm whose job this is, if it is one. Raises ConfigError."""
    location, composer = planned.location, planned.composer
    if location is None or location.allocation.source != "slurm":
        return None
    from distlaunch.launch_slurm import Site

    flexible = composer is not None and (composer.bounds[0] < composer.bounds[1] or composer.spares > 0)
    part = location.allocation.part
    return Site(environ, options, part=part, several=composer is not None, flexible=flexible)


def _no_site(options: TrainOptions) -> Iterator[str]:
    if options.requeue:
        yield f"{options.named('requeue')} has no effect: this is no job of Slurm"


def _other_nodes(
    planned: Planned, options: TrainOptions, environ: Mapping[str, str], site: Site | None
) -> Nodes | None:
    """Give the nodes that are to be reached by links; None if this machine is all. Raises ConfigError."""
    if planned.location is None:
        return None
    from distlaunch import launch_nodes

    if planned.composer is None and launch_nodes.is_alone(planned.location, planned.topology):
        return None
    launch_nodes.refuse_others(planned.location, planned.topology)
    if planned.composer is None:
        return None
    return launch_nodes.Nodes(planned.composer, options, environ, site=site, allocation=planned.location.allocation)


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
        lost = sink.close(timeout_s=_LATE_CLOSE_S if late else None if ended[-1:] == [0] else CONSOLE_CLOSE_S)
        if lost and select.select([], [STDERR], [], 0)[1]:
            with suppress(OSError):
                os.write(STDERR, f"distlaunch: {lost} bytes of output could not be shown\n".encode())
        if late:
            signal.raise_signal(late[0])


def _allow_descriptors(workers: int) -> int:
    """Raise our own limit of open files as far as the job needs; give the soft limit that we found."""
    needed = needed_descriptors(workers)
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
    options: TrainOptions,
    plan: LaunchPlan,
    environ: Mapping[str, str],
    *,
    nodes: Nodes | None,
    site: Site | None,
    terminal: bool,
) -> PolicySettings:
    return PolicySettings(
        hosts=tuple(node.host for node in plan.nodes),
        first_ranks=plan.first_ranks,
        world_size=len(plan.workers),
        scheduler=None if site is None else site.scheduler(),
        gathering=None if nodes is None else nodes.gathering(),
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
        repeated_term_kills=not hints(environ),
    )
