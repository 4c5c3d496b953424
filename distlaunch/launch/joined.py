"""Run a job that has one launcher per node or per worker.

One launcher is the coordinator, which decides for the job. The others, joined launchers, follow it.
"""

from __future__ import annotations

import os
import shlex
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from distlaunch.coordinator.joined.admission import CoordinatorConnector, RendezvousPort
from distlaunch.coordinator.joined.consoles import CoordinatorConsole, LocalRanks
from distlaunch.coordinator.joined.launcher import JoinedRunner, JoinedSettings, decline, leave
from distlaunch.coordinator.joined.launchers import JoinedLaunchers
from distlaunch.coordinator.joined.local_node import LocalNode
from distlaunch.coordinator.policy.events_and_actions import AttemptPlan
from distlaunch.coordinator.policy.job import JobPolicy
from distlaunch.coordinator.policy.job_settings import NodeSetupSettings
from distlaunch.coordinator.runtime.error_file import ErrorFile
from distlaunch.coordinator.runtime.records import EventLog, LineFilter, OutputFiles
from distlaunch.coordinator.runtime.run_directory import join_run_dir, make_run_dir, new_job_id
from distlaunch.coordinator.runtime.runner import JobClock, Runner
from distlaunch.coordinator.runtime.signal_pipe import SignalPipe
from distlaunch.coordinator.runtime.sink import Sink
from distlaunch.core.agent import connect
from distlaunch.core.agent.remote_agent import PausableClock
from distlaunch.core.agent.workers.process_tree import ChildReaper, children_of, kill_each_tree
from distlaunch.core.errors import EXIT_SOFTWARE, ConfigError, LaunchError, NodesError
from distlaunch.core.model.record import replace
from distlaunch.core.model.text import counted, quoted
from distlaunch.core.probe.files import read_bounded
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol.agent_messages import Surveyed
from distlaunch.core.protocol.handshake import JobIdentity
from distlaunch.core.protocol.token_keys import TOKEN
from distlaunch.launch import process
from distlaunch.launch.job_observers import JobObservers
from distlaunch.launch.make_plan import Planned, read_facts
from distlaunch.planning.joined_plan import JoinedPlanner
from distlaunch.planning.node_source import Location, locate
from distlaunch.planning.rendezvous import Rendezvous, choose_rendezvous_without_plan
from distlaunch.planning.train_options import TorchrunOptions, TrainOptions
from distlaunch.transport.tcp_listener import PortTakenError

if TYPE_CHECKING:
    from distlaunch.launch.slurm import SlurmJob

OtherAddresses = Callable[[], Sequence[str]]
OpenSink = Callable[[int], Sink]
OpenFilters = Callable[[int], Mapping[int, LineFilter]] | None

_TOKEN_BYTES = 16
_MOST_TOKEN_BYTES = 4096
_LEAST_TOKEN = 16
"""Shortest token, in characters, that needs no --weak-token-ok."""
_READ_BY_OTHERS = stat.S_IRGRP | stat.S_IROTH
_MAKE_TOKEN = "openssl rand -hex 32"  # noqa: S105 - a command
_TOKEN_FILE_S = 10.0
_SPAWNER_END_S = 5.0


def read_token(
    options: TrainOptions,
    environ: Mapping[str, str],
    *,
    say: Callable[[str], None] = lambda _: None,
) -> bytes | None:
    """Return the secret that the launchers of a job share; None if the user has set none.

    It comes from --token-file, else from a variable. ``say`` is called with a notice. Raises
    ConfigError if the token is empty, or too short without --weak-token-ok, or if its file cannot
    be read or can be read by other users.
    """
    path = options.token_file
    if path is None:
        value = environ.get(TOKEN)
        if value is None:
            return None
        if not value.strip():
            raise ConfigError(
                f"{TOKEN} is empty",
                hint="unset it, or set the same secret for all launchers of the job",
            )
        token = value.strip().encode(errors="surrogateescape")
        _check_token(token, TOKEN, options)
        return token
    who = f"{options.named('token_file')} {quoted(path)}"
    try:
        _check_readers(path, who, environ, say)
        token = read_bounded(path, most=_MOST_TOKEN_BYTES, timeout_s=_TOKEN_FILE_S).strip()
    except OSError as exc:
        raise ConfigError(f"{who}: {exc.strerror}") from exc
    except ValueError as exc:
        raise ConfigError(f"{who}: the name of a file cannot have a NUL") from exc
    if not token:
        raise ConfigError(f"{who} is empty", hint=f"{_MAKE_TOKEN} makes a token")
    _check_token(token, f"the token in {who}", options)
    return token


def _check_token(token: bytes, what: str, options: TrainOptions) -> None:
    size = len(token.decode(errors="replace"))
    if size < _LEAST_TOKEN and not options.weak_token_ok:
        raise ConfigError(
            f"{what} has only {counted(size, 'character')}, so that it can be guessed",
            hint=f"{_MAKE_TOKEN} makes a better one; {options.named('weak_token_ok')} accepts "
            "this one",
        )


def _check_readers(
    path: str, who: str, environ: Mapping[str, str], say: Callable[[str], None]
) -> None:
    """Raise ConfigError for a file that other users can read.

    In a pod only show a notice, because Kubernetes mounts Secrets with such a mode.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) or not mode & _READ_BY_OTHERS:
        return
    text = f"{who} can be read by other users (its mode is {stat.S_IMODE(mode):04o})"
    if "KUBERNETES_SERVICE_HOST" not in environ:
        raise ConfigError(text, hint=f"chmod 600 {shlex.quote(path)}")
    say(f"{text}; set defaultMode 0400 for the Secret's volume")


def make_job_identity(
    rendezvous: Rendezvous,
    options: TrainOptions,
    environ: Mapping[str, str],
    *,
    say: Callable[[str], None] = lambda _: None,
) -> JobIdentity:
    """Return the values that all launchers of the job must share.

    Without a token, a Slurm job uses MUNGE if it is there. Raises as ``read_token``.
    """
    from distlaunch import __version__

    token = read_token(options, environ, say=say)
    munge = None
    if token is None and "SLURM_JOB_ID" in environ:
        from distlaunch.transport.munge import find_munge

        munge = find_munge(environ)
    return JobIdentity(release=__version__, job_key=rendezvous.job_key, token=token, munge=munge)


class JobLaunchers:
    """The policy's settings and the connections for the launchers of one job, in the
    coordinator."""

    def __init__(
        self,
        planner: JoinedPlanner,
        options: TrainOptions,
        *,
        other_addresses: OtherAddresses | None = None,
        alone: str | None = None,
    ) -> None:
        """``other_addresses`` returns the addresses by which the scheduler reaches node 0, this
        machine.

        ``alone`` is a hint on how to run without the other nodes; None if there is no way.
        """
        self._planner = planner
        self._addresses_of_node_0 = other_addresses
        self._options = options
        self._alone = alone
        self._joined_launchers: JoinedLaunchers | None = None

    def node_setup_settings(self) -> NodeSetupSettings:
        """Return the settings of the policy for the nodes, with the functions that it calls."""
        planner = self._planner
        tokens: dict[int, str] = {}

        def plan_attempt(surveys: Mapping[int, Surveyed]) -> AttemptPlan:
            known = {} if self._joined_launchers is None else self._joined_launchers.records
            node_numbers, plan = planner.plan_attempt(surveys, known)
            return AttemptPlan(
                node_numbers=node_numbers, plan=plan, places=planner.hosts_and_first_ranks(plan)
            )

        def of_scheduler(_: str) -> Sequence[str]:
            return () if self._addresses_of_node_0 is None else self._addresses_of_node_0()

        return NodeSetupSettings(
            hosts=planner.hosts,
            bounds=planner.bounds,
            survey=planner.survey,
            plan_attempt=plan_attempt,
            addresses=partial(planner.addresses, of_scheduler=of_scheduler),
            choose_master=partial(planner.choose_master, of_scheduler=of_scheduler),
            token=lambda attempt: tokens.setdefault(attempt, os.urandom(_TOKEN_BYTES).hex()),
            join_timeout_s=self._options.join_timeout,
            launchers=True,
            alone=self._alone,
        )

    def joined_launchers(
        self,
        own: LocalNode,
        *,
        host: str,
        job_id: str,
        folder: str,
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> JoinedLaunchers:
        """Return the connections to the other launchers. Launcher 0 is ``own``."""
        planner = self._planner
        self._joined_launchers = JoinedLaunchers(
            own=own,
            host=host,
            size=len(planner.hosts),
            rank_name="rank" if planner.by_worker else "node rank",
            job_id=job_id,
            folder=folder,
            rules=planner,
            say=say,
            clock=clock,
        )
        return self._joined_launchers


# --- a whole job


def report_no_plan(options: TrainOptions, environ: Mapping[str, str], why: LaunchError) -> None:
    """Send the other launchers, for up to 2 s, the error for which this launcher has no plan.

    Node 0 sends it to all others; another launcher sends it to node 0. Does nothing if the
    launchers are not known without a plan.
    """
    if options.discover is not None or options.include is not None or options.exclude is not None:
        return  # without a plan the ranks are not known
    try:
        facts = read_facts(options, environ)
        location = None if facts.surroundings is None else locate(options, facts)[0]
        if location is None or location.allocation.part == "all":
            return
        rendezvous = choose_rendezvous_without_plan(options, location)
        job_identity = make_job_identity(rendezvous, options, environ)
        if rendezvous.leads != "yes":
            other_addresses = _addresses_of_node_0(rendezvous, location, environ)
            decline(
                rendezvous,
                job_identity,
                host=facts.hostname,
                why=why.message,
                other_addresses=other_addresses,
            )
        elif location.allocation.part == "worker" or len(location.allocation.hosts) > 1:
            RendezvousPort(
                rendezvous,
                job_identity,
                num_launchers=len(location.allocation.hosts),
                say=lambda _: None,
            ).refuse(why)
    except LaunchError:
        return  # the first error is the one that counts


def run_launcher(
    planned: Planned,
    options: TrainOptions,
    environ: Mapping[str, str],
    *,
    slurm_job: SlurmJob | None,
    open_sink: OpenSink,
    open_filters: OpenFilters,
    count_from: Callable[[int], None] | None,
    error_file: ErrorFile,
) -> int:
    """Run this launcher's share of a job, as coordinator or joined launcher, and return the exit
    code.

    Raises LaunchError for an error before the job starts, after the other launchers have got it.
    """
    if planned.join is None:
        raise ValueError("this launcher is alone")
    planner = planned.join()
    notices: list[str] = []
    job_identity = make_job_identity(planner.rendezvous, options, environ, say=notices.append)
    local = isinstance(options, TorchrunOptions) and options.format is None
    sink: Sink = open_sink(max(2, planner.own_workers) if local else planner.most_workers)
    if local:
        sink = LocalRanks(sink)
    if planned.explanation is not None:
        sink.say("\n  ".join(["where this comes from:", *planned.explanation.lines()]))
    for text in notices:
        sink.say(text)
    clock = JobClock()
    other_addresses = _addresses_of_node_0(planner.rendezvous, planned.location, environ)
    warn = partial(sink.say, level="warning")
    rendezvous_port: RendezvousPort | None = None
    if planner.rendezvous.leads != "no":
        try:
            rendezvous_port = RendezvousPort(
                planner.rendezvous,
                job_identity,
                num_launchers=len(planner.hosts),
                say=warn,
                clock=clock,
            )
        except PortTakenError:
            if planner.rendezvous.leads == "yes":
                raise
    try:
        process.check_system()
        observers = None if rendezvous_port is None else JobObservers(options, environ, sink)
        parts = _LauncherParts(
            planned, planner, options, environ, sink, open_filters, count_from, error_file
        )
    except LaunchError as exc:
        if rendezvous_port is None:
            decline(
                planner.rendezvous,
                job_identity,
                host=planner.hostname,
                why=exc.message,
                other_addresses=other_addresses,
            )
        else:
            rendezvous_port.refuse(exc)
        raise
    if rendezvous_port is None or observers is None:
        names = [options.named(name) for name in ("on_event", "metrics") if getattr(options, name)]
        if names and planner.shows_notices:
            sink.say(f"{' and '.join(names)}: only the launcher of node 0 does this, for all nodes")
        return _run_as_joined_launcher(parts, job_identity, other_addresses)
    return _run_as_coordinator(parts, rendezvous_port, slurm_job, clock, other_addresses, observers)


class _LauncherParts:
    """The objects that a coordinator and a joined launcher both need. Forks the spawner."""

    def __init__(
        self,
        planned: Planned,
        planner: JoinedPlanner,
        options: TrainOptions,
        environ: Mapping[str, str],
        sink: Sink,
        open_filters: OpenFilters,
        count_from: Callable[[int], None] | None,
        error_file: ErrorFile,
    ) -> None:
        self.planned, self.planner, self.options, self.environ, self.sink = (
            planned,
            planner,
            options,
            environ,
            sink,
        )
        self.hostname = planner.hostname
        self._count_from = count_from
        self.error_file = error_file
        error_file.say = partial(sink.say, level="warning")
        self._filters = open_filters(planner.own_workers) if open_filters else {}
        self._nofile = process.allow_descriptors(planner.own_workers)
        self._spawner = process.new_spawner("job", options)  # before the first thread

    def files(self, run_dir: str) -> OutputFiles:
        """Return a writer for the output of this launcher's ranks. It creates no files yet."""
        workers, sink = self.planner.own_workers, self.sink
        return OutputFiles(
            run_dir,
            sink,
            partial(sink.say, level="warning"),
            layout=self.planned.plan.layout,
            ranks=range(workers),
            filters=self._filters,
        )

    def node(self, job_id: str, files: OutputFiles, clock: Callable[[], float]) -> LocalNode:
        """Return the agent of this machine, which is not started."""
        planner = self.planner
        return LocalNode(
            job_id=job_id,
            nofile=self._nofile,
            spawner=self._spawner,
            sink=files,
            clock=clock,
            gpus=planner.gpus,
            cpus=planner.cpus,
        )

    def count_from(self, first_rank: int) -> None:
        """Set the first rank that the console shows for this node."""
        if self._count_from is not None:
            self._count_from(first_rank)
        if isinstance(self.sink, LocalRanks):
            self.sink.first_rank = first_rank
            for lines in self._filters.values():
                lines.first_rank = first_rank

    def set_file_suffix(self, node: int) -> None:
        """Add the node's number to the names of the filter files, which have no rank, because
        launchers may share a run directory."""
        for lines in self._filters.values():
            lines.suffix = f"-{node}"

    def stop_spawner(self) -> None:
        """End the spawner before it has started a worker.

        If it does not exit within ``_SPAWNER_END_S``, kill it.
        """
        channel, pid = self._spawner
        reaper = ChildReaper(pid)
        channel.close()
        if reaper.await_child(bound_s=_SPAWNER_END_S) is None and pid in children_of(os.getpid()):
            kill_each_tree([pid])
            reaper.await_child(bound_s=_SPAWNER_END_S)


def _addresses_of_node_0(
    rendezvous: Rendezvous, location: Location | None, environ: Mapping[str, str]
) -> OtherAddresses | None:
    """Return a function that returns Slurm's addresses of node 0, which need no name service.

    Return None without Slurm, or if the user has set another rendezvous.
    """
    if location is None or location.allocation.source != "slurm":
        return None
    first = location.allocation.hosts[0].name
    if rendezvous.host != first:  # the user has set another rendezvous
        return None
    from distlaunch.launch.slurm import NodeAddresses

    addresses = NodeAddresses(environ, (first,))
    if rendezvous.leads == "yes":
        addresses.ask()  # other launchers only need it if node 0's name cannot be resolved
    return lambda: addresses.of(first)


def _run_as_coordinator(
    parts: _LauncherParts,
    rendezvous_port: RendezvousPort,
    slurm_job: SlurmJob | None,
    clock: JobClock,
    other_addresses: OtherAddresses | None,
    observers: JobObservers,
) -> int:
    """Run the job as its coordinator, from run directory to exit code."""
    options, environ, planner, sink = parts.options, parts.environ, parts.planner, parts.sink
    job_id = parts.planned.plan.job_id or new_job_id(time.time(), os.urandom(3))
    with ExitStack() as stack:
        try:
            run_dir = make_run_dir(options.log_dir, job_id, environ)
        except LaunchError as exc:
            parts.stop_spawner()
            rendezvous_port.refuse(exc)
            raise
        stack.callback(run_dir.close)
        planner.set_job(job_id, run_dir.path)
        plan = replace(parts.planned.plan, job_id=job_id, run_dir=run_dir.path)
        files = parts.files(run_dir.path)
        stack.callback(files.close)
        launchers = JobLaunchers(
            planner, options, other_addresses=other_addresses, alone=_run_alone_hint(parts)
        )
        own = parts.node(job_id, files, clock)
        housekeeping = process.Housekeeping(run_dir)
        signal_pipe = SignalPipe()
        stack.callback(housekeeping.finish, signal_pipe.is_hurried)
        ended = stack.enter_context(process.closed_console(sink, signal_pipe))

        warn = partial(sink.say, level="warning")
        joined_launchers = launchers.joined_launchers(
            own,
            host=planner.hostname,
            job_id=job_id,
            folder=os.path.basename(run_dir.path),
            say=warn,
            clock=clock,
        )
        joined_launchers.silence_s = options.lost_after
        stack.callback(observers.finish, signal_pipe.is_hurried)
        if slurm_job is not None:  # after the other launchers have the result: Slurm may be slow
            stack.callback(
                lambda: (
                    ended.append(slurm_job.requeue_if_interrupted(policy, ended[-1], sink))
                    if ended
                    else None
                )
            )
        stack.callback(joined_launchers.close, signal_pipe.is_hurried)
        console = CoordinatorConsole(sink, joined_launchers.notice)
        settings = process.policy_settings(
            options,
            plan,
            environ,
            backend=parts.planned.backend,
            node_setup=launchers.node_setup_settings(),
            scheduler=None if slurm_job is None else slurm_job.scheduler(),
            terminal=False,
        )
        policy = JobPolicy(settings)
        events = EventLog(run_dir.events, sink)
        runner = Runner(
            plan=plan,
            policy=policy,
            run_dir=run_dir,
            transport=joined_launchers,
            files=files,
            sink=console,
            events=events,
            signal_pipe=signal_pipe,
            clock=clock,
            terminal=None,
            takes_typed=options.dialect.takes_typed,
            launchers=True,
            backend=parts.planned.backend,
            error_file=parts.error_file,
            output_bytes=lambda: files.output_bytes,
        )
        observers.observe(runner, events, job_id=job_id, run_dir=run_dir.path)
        observers.serve(runner, events)
        run_dir.link_latest()
        process.warn_about_log_directory(run_dir, job_id, sink)
        if rendezvous_port.is_open_to_all:
            sink.say(
                "the job has no token, so anybody who can connect to port "
                f"{rendezvous_port.listener.port} of this machine can join it; set {TOKEN} on all "
                f"nodes ({_MAKE_TOKEN} makes a token)"
            )
        for note in () if slurm_job is None else slurm_job.notes():
            console.say(note, level="warning")
        housekeeping.start_for(runner)
        rendezvous_port.open(joined_launchers)
        try:
            code = runner.run()
        except LaunchError as exc:
            joined_launchers.verdict = p.ExitLauncher(
                exit_code=exc.exit_code,
                text=f"error: {exc.message}",
                summary=exc.message,
                is_error=True,
            )
            rendezvous_port.refuse(exc)
            raise
        joined_launchers.verdict = console.verdict(code, runner.summary)
        ended.append(code)
    return ended[-1]


def _run_as_joined_launcher(
    parts: _LauncherParts, job_identity: JobIdentity, other_addresses: OtherAddresses | None
) -> int:
    """Connect to the coordinator, and run this node's workers until the job ends. Return the exit
    code.

    Raises LaunchError if the coordinator or the run directory cannot be used.
    """
    options, environ, planner, sink = parts.options, parts.environ, parts.planner, parts.sink
    with ExitStack() as stack:
        signal_pipe = SignalPipe()
        ended = stack.enter_context(process.closed_console(sink, signal_pipe))
        connector = CoordinatorConnector(
            planner,
            job_identity,
            join_timeout_s=options.join_timeout,
            say=sink.say,
            signals=signal_pipe,
            other_addresses=other_addresses,
        )
        try:
            connection, welcome = connector()
        except connect.ConnectInterrupted:
            parts.stop_spawner()
            ended.append(_interrupted_exit_code(connector))
            return ended[0]
        except LaunchError as exc:
            parts.stop_spawner()
            if isinstance(exc, NodesError) and (alone := _run_alone_hint(parts)) is not None:
                raise NodesError(
                    exc.message, hint=f"{exc.hint}; {alone}" if exc.hint else alone
                ) from exc
            raise
        node = welcome.rank
        try:
            folder = welcome.folder or welcome.job_id
            run_dir = join_run_dir(
                options.log_dir, folder, environ, node=node, job_id=welcome.job_id
            )
        except LaunchError as exc:
            parts.stop_spawner()
            leave(connection, exc.message)
            raise
        stack.callback(run_dir.close)
        planner.set_job(welcome.job_id, run_dir.path)
        parts.set_file_suffix(node)
        files = parts.files(run_dir.path)
        stack.callback(files.close)
        if planner.shows_notices:
            sink.say(
                f"job {welcome.job_id}: {connector.rank_name} {node}, joined {connector.coordinator}; logs: "
                f"{run_dir.path}"
            )
        clock = PausableClock()
        runner = JoinedRunner(
            settings=JoinedSettings(
                coordinator=connector.coordinator,
                job_id=welcome.job_id,
                max_restarts=options.max_restarts,
                failure_grace_s=options.failure_grace,
                lost_after_s=options.lost_after,
                flexible=planner.is_elastic,
                leaves=planner.stops_alone,
                grace_s=options.grace,
                speaks=planner.shows_notices,
            ),
            planner=planner,
            own=parts.node(welcome.job_id, files, clock),
            files=files,
            sink=sink,
            events=EventLog(run_dir.events, sink),
            signal_pipe=signal_pipe,
            clock=clock,
            call=connector,
            count_from=parts.count_from,
            error_file=parts.error_file,
        )
        stack.callback(runner.close, signal_pipe.is_hurried)
        try:
            ended.append(runner.run(connection))
        except connect.ConnectInterrupted:
            ended.append(_interrupted_exit_code(connector))
    return ended[0]


def _run_alone_hint(parts: _LauncherParts) -> str | None:
    location = parts.planned.location
    return (
        None
        if location is None or location.allocation.by_user
        else process.run_alone_hint(parts.options)
    )


def _interrupted_exit_code(connector: CoordinatorConnector) -> int:
    return EXIT_SOFTWARE if connector.ended_by is None else 128 + connector.ended_by
