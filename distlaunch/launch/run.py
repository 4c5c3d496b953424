"""Make the plan of a job, run the job, return the exit code.

``_run_plan`` is the way of a job with one launcher, on this machine or on others; ``launch.joined`` has
the other way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from distlaunch.coordinator.policy.job import JobPolicy
from distlaunch.coordinator.runtime.error_file import ErrorFile, error_file_path
from distlaunch.coordinator.runtime.keyboard import Terminal
from distlaunch.coordinator.runtime.local_agent import LocalTransport
from distlaunch.coordinator.runtime.records import DiskWork, EventLog, LineFilter, OutputFiles
from distlaunch.coordinator.runtime.run_directory import make_run_dir
from distlaunch.coordinator.runtime.runner import AttemptFiles, JobClock, Runner
from distlaunch.coordinator.runtime.signal_pipe import SignalPipe
from distlaunch.coordinator.runtime.sink import Sink
from distlaunch.core.agent.node.ports import hold_port
from distlaunch.core.errors import ConfigError, LaunchError
from distlaunch.core.model.plan import LaunchPlan, OuterLauncher
from distlaunch.core.model.record import Record, replace
from distlaunch.launch.job_observers import JobObservers
from distlaunch.launch.make_plan import Planned, is_started_by_script, make_plan
from distlaunch.launch.process import (
    Housekeeping,
    allow_descriptors,
    check_system,
    closed_console,
    new_spawner,
    policy_settings,
    warn_about_log_directory,
)
from distlaunch.planning.clusters.select import has_markers
from distlaunch.planning.train_options import TrainOptions

if TYPE_CHECKING:
    from distlaunch.coordinator.runtime.remote_agents import RemoteAgents
    from distlaunch.launch.detach import DetachedLauncher
    from distlaunch.launch.remote import RemoteNodes
    from distlaunch.launch.slurm import SlurmJob
    from distlaunch.transport.ray.nodes import RayCluster

OpenSink = Callable[[int], Sink]
OpenWorkerSink = Callable[[OuterLauncher], Sink]
"""The argument is the launcher whose worker this launcher is."""
OpenTerminal = Callable[[], Terminal | None]
"""Returns the user's terminal if the only worker may have it."""
OpenFilters = Callable[[int], Mapping[int, LineFilter]]
"""Returns, for a number of workers, the filters that copy lines of stdout (1) and stderr (2)."""


class _Openers(Record):
    sink: OpenSink
    worker_sink: OpenWorkerSink
    terminal: OpenTerminal
    filters: OpenFilters | None
    error_file: ErrorFile
    detached: DetachedLauncher | None


def run_job(
    options: TrainOptions,
    environ: Mapping[str, str],
    *,
    open_sink: OpenSink,
    open_worker_sink: OpenWorkerSink,
    open_terminal: OpenTerminal,
    open_filters: OpenFilters | None = None,
    count_from: Callable[[int], None] | None = None,
    detached: DetachedLauncher | None = None,
) -> int:
    """Run a job and return the exit code.

    ``open_sink`` and the like are called when needed. ``count_from`` gets the lowest rank of this
    launcher's workers if each node has a launcher. ``detached`` is this launcher's side of
    --detach. Raises LaunchError, which the error file has got.
    """
    path = error_file_path(
        options.error_file, environ, of_a_script=is_started_by_script(options, environ)
    )
    error_file = ErrorFile(path)
    opening = _Openers(
        sink=open_sink,
        worker_sink=open_worker_sink,
        terminal=open_terminal,
        filters=open_filters,
        error_file=error_file,
        detached=detached,
    )
    try:
        return _plan_and_run(options, environ, opening, count_from)
    except LaunchError as exc:
        error_file.write(
            exc.message,
            f"{exc.message}\nhint: {exc.hint}" if exc.hint else exc.message,
            exc.exit_code,
        )
        raise


def _plan_and_run(
    options: TrainOptions,
    environ: Mapping[str, str],
    opening: _Openers,
    count_from: Callable[[int], None] | None,
) -> int:
    """Make the plan, and run it in the way that it needs.

    If there is no plan, tell other launchers of the job, if any.
    """
    try:
        planned = make_plan(options, environ)
        slurm_job = _slurm_job(planned, options, environ)
        if opening.detached is not None:
            from distlaunch.launch.detach import check_planned

            check_planned(planned)
    except ConfigError as exc:
        if options.rendezvous is not None or options.node_rank is not None or has_markers(environ):
            from distlaunch.launch.joined import report_no_plan

            report_no_plan(options, environ, exc)
        raise
    if planned.join is not None:
        from distlaunch.launch.joined import run_launcher

        return run_launcher(
            planned,
            options,
            environ,
            slurm_job=slurm_job,
            open_sink=opening.sink,
            open_filters=opening.filters,
            count_from=count_from,
            error_file=opening.error_file,
        )
    if planned.location is None or planned.location.allocation.source != "ray":
        return _run_plan(planned, options, environ, slurm_job, None, opening)
    from distlaunch.launch.ray import place_in_ray

    with place_in_ray(planned, options, environ) as (planned, ray_cluster):
        return _run_plan(planned, options, environ, slurm_job, ray_cluster, opening)


def _run_plan(
    planned: Planned,
    options: TrainOptions,
    environ: Mapping[str, str],
    slurm_job: SlurmJob | None,
    ray_cluster: RayCluster | None,
    opening: _Openers,
) -> int:
    """Run the job of this launcher alone, from run directory to exit code."""
    plan = planned.plan
    nodes = _remote_nodes(planned, options, environ, slurm_job, ray_cluster)
    check_system()
    workers = len(plan.workers) if nodes is None else nodes.most_workers
    terminal = (
        opening.terminal() if workers == 1 and nodes is None and plan.shown_size == 1 else None
    )
    if plan.outer is None or terminal is not None:
        sink = opening.sink(workers)
    else:
        from distlaunch.coordinator.joined.consoles import OuterRanks

        sink = OuterRanks(opening.worker_sink(plan.outer), first_rank=plan.outer.rank)
    opening.error_file.say = partial(sink.say, level="warning")
    if planned.explanation is not None:
        sink.say("\n  ".join(["where this comes from:", *planned.explanation.lines()]))
    observers = JobObservers(options, environ, sink)
    script = planned.source.read() if planned.source is not None else b""
    nofile = allow_descriptors(workers if nodes is None else 0)
    port = (
        hold_port(plan.wanted_port, owner=plan.job_id) if nodes is None else None
    )  # fails before anything is created
    run_dir = make_run_dir(options.log_dir, plan.job_id, environ)
    if opening.detached is not None:
        opening.detached.on_run_dir(run_dir.path)
    if run_dir.path != plan.run_dir:
        plan = replace(
            plan, run_dir=run_dir.path, env={**plan.env, "DISTLAUNCH_RUN_DIR": run_dir.path}
        )
    if planned.id_of_scheduler:
        plan = _with_job_id(plan, os.path.basename(run_dir.path), options)
    if planned.source is not None:
        planned_path = os.path.join(planned.plan.run_dir, planned.source.name)
        plan, options = _with_script(
            plan, options, script, before=planned_path, folder=run_dir.path
        )
    clock = JobClock()
    files = OutputFiles(
        plan.run_dir,
        sink,
        lambda text: sink.say(text, level="warning"),
        layout=plan.layout,
        ranks=range(workers),
        filters=opening.filters(workers) if opening.filters else None,
        on_output=None if opening.detached is None else opening.detached.on_output,
    )
    with ExitStack() as stack:
        stack.callback(run_dir.close)
        stack.callback(files.close)
        transport: LocalTransport | RemoteAgents
        filed: AttemptFiles = files
        disk_work = DiskWork()
        if nodes is None:
            transport = LocalTransport(
                job_id=plan.job_id,
                cookie=os.urandom(8).hex(),
                nofile=nofile,
                # Before the first thread.
                spawner=new_spawner(
                    plan.job_id, options, terminal=-1 if terminal is None else terminal.fileno()
                ),
                port=port,
                sink=files,
                clock=clock,
            )
        else:
            transport = filed = nodes.remote_agents(
                files, clock, run_dir=run_dir.path, job_id=plan.job_id
            )
            disk_work = transport.disk_work
        housekeeping = Housekeeping(run_dir)
        signal_pipe = SignalPipe()
        stack.callback(housekeeping.finish, signal_pipe.is_hurried)
        ended = stack.enter_context(closed_console(sink, signal_pipe))
        if terminal is not None:
            stack.callback(terminal.restore)
        settings = policy_settings(
            options,
            plan,
            environ,
            backend=planned.backend,
            node_setup=None if nodes is None else nodes.node_setup_settings(),
            scheduler=None if slurm_job is None else slurm_job.scheduler(),
            terminal=terminal is not None,
        )
        policy = JobPolicy(settings)
        stack.callback(observers.finish, signal_pipe.is_hurried)
        if slurm_job is not None:
            stack.callback(
                lambda: (
                    ended.append(slurm_job.requeue_if_interrupted(policy, ended[-1], sink))
                    if ended
                    else None
                )
            )
        stack.callback(transport.close, signal_pipe.is_hurried)
        events = EventLog(run_dir.events, sink, disk_work=disk_work, first_rank=plan.first_shown)
        runner = Runner(
            plan=plan,
            policy=policy,
            run_dir=run_dir,
            transport=transport,
            files=filed,
            sink=sink,
            events=events,
            disk_work=disk_work,
            signal_pipe=signal_pipe,
            clock=clock,
            terminal=terminal,
            takes_typed=options.dialect.takes_typed,
            feeder=None if nodes is None else nodes.feeder,
            node_logs=options.node_logs or "",
            backend=planned.backend,
            error_file=opening.error_file,
            output_bytes=lambda: files.output_bytes,
            on_started=None if opening.detached is None else opening.detached.on_started,
        )
        observers.observe(runner, events, job_id=plan.job_id, run_dir=plan.run_dir)
        observers.serve(runner, events)
        run_dir.link_latest()
        warn_about_log_directory(run_dir, plan.job_id, sink)
        for note in (
            slurm_job.notes() if slurm_job is not None else _notices_about_slurm_options(options)
        ):
            sink.say(note, level="warning")
        if opening.detached is not None and nodes is not None and slurm_job is None:
            from distlaunch.launch.detach import credential_warnings

            for warning in credential_warnings(options, environ):
                sink.say(warning, level="warning")
        housekeeping.start_for(runner)
        ended.append(runner.run())
    return ended[-1]


def _with_job_id(plan: LaunchPlan, job_id: str, options: TrainOptions) -> LaunchPlan:
    env = {**plan.env, "DISTLAUNCH_JOB_ID": job_id}
    if options.dialect.run_id is None:
        env["TORCHELASTIC_RUN_ID"] = job_id
    return replace(plan, job_id=job_id, env=env)


def _with_script(
    plan: LaunchPlan, options: TrainOptions, text: bytes, *, before: str, folder: str
) -> tuple[LaunchPlan, TrainOptions]:
    """Write a script that was read from a pipe into the run directory. Return plan and options that
    have its path.

    ``before`` is the path in the plan; the run directory may have been renamed since.
    """
    from distlaunch.launch.script_source import write_script

    path = write_script(folder, os.path.basename(before), text)

    def moved(words: tuple[str, ...]) -> tuple[str, ...]:
        at = words.index(before)
        return (*words[:at], path, *words[at + 1 :])

    workers = tuple(
        worker if worker.argv is None else replace(worker, argv=moved(worker.argv))
        for worker in plan.workers
    )
    return replace(plan, argv=moved(plan.argv), workers=workers), replace(options, script=path)


def _slurm_job(
    planned: Planned, options: TrainOptions, environ: Mapping[str, str]
) -> SlurmJob | None:
    location, planner = planned.location, planned.planner
    if location is None or location.allocation.source != "slurm":
        return None
    from distlaunch.launch.slurm import SlurmJob

    flexible = planner is not None and (planner.bounds[0] < planner.bounds[1] or planner.spares > 0)
    part = location.allocation.part
    hosts = [host.name for host in location.allocation.hosts]
    return SlurmJob(
        environ, options, part=part, several=planner is not None, flexible=flexible, hosts=hosts
    )


def _notices_about_slurm_options(options: TrainOptions) -> Iterator[str]:
    if options.requeue:
        yield f"{options.named('requeue')} has no effect: this is not a Slurm job"


def _remote_nodes(
    planned: Planned,
    options: TrainOptions,
    environ: Mapping[str, str],
    slurm_job: SlurmJob | None,
    ray_cluster: RayCluster | None,
) -> RemoteNodes | None:
    """Return the nodes of a job whose agents this launcher starts elsewhere; None for a local
    job."""
    if planned.location is None or planned.planner is None:
        return None
    from distlaunch.launch import remote

    allocation = planned.location.allocation
    return remote.RemoteNodes(
        planned.planner,
        options,
        environ,
        slurm_job=slurm_job,
        allocation=allocation,
        ray_cluster=ray_cluster,
    )
