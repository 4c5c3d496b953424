"""Messages between an agent and its spawner, the parent process of the node's workers."""

from __future__ import annotations

from collections.abc import Mapping

from distlaunch.core.model.record import Record
from distlaunch.core.model.run_files import TRAIN, Layout
from distlaunch.core.model.worker_exit import WorkerExit

SCOPE_PROCESS = "process"
SCOPE_GROUP = "group"
SCOPE_TREE = "tree"


class LeftoverProcess(Record):
    """A process that an exited worker has left running."""

    rank: int | None
    """The rank of the worker from which it descends, if its session or environment shows it."""
    pid: int
    command: str
    """The argument list on one line, shortened."""


class Leftovers(Record):
    """Processes that exited workers have left running."""

    count: int = 0
    shown: tuple[LeftoverProcess, ...] = ()
    """The first few processes."""


class Setup(Record):
    """Common values of an attempt's workers."""

    env: Mapping[str, str]
    cwd: str
    cookie: str
    nofile: int
    """The workers' soft limit of open files: that with which the launcher was started."""
    signal_group: bool
    """Stop signals go to the workers' process groups, even if the agent has vanished."""
    job_id: str = ""
    """Job id for the spawner's process title, if unknown when it started."""
    orphan_grace_s: float | None = None
    """Time between TERM and KILL if the agent vanishes. None: the spawner's default."""
    temporary_dir: str = ""
    """The agent's temporary directory, which the spawner removes if the agent vanishes."""
    shared_memory: tuple[str, ...] = ()
    """Names of files that workers may leave in /dev/shm, which the spawner removes after the last
    worker."""
    attempt: int = 0
    log_dir: str = ""
    """Run directory in which the spawner continues the logs if the agent vanishes; empty: no
    logs."""
    layout: Layout = TRAIN
    """Names of the files in ``log_dir``."""


class Preload(Record):
    """Start a preload server, which imports modules once. Later workers are forked from it.

    The answer is ``Preloaded`` or ``PreloadFailed``, which may also follow later if the server has
    ended. ``StillPreloading`` reports slow imports, ``ModuleLeftOut`` a module that cannot be
    preloaded. One descriptor accompanies the frame, for the server's output. The server has the
    environment of the last ``Setup``.
    """

    modules: tuple[str, ...]
    argv: tuple[str, ...]
    """The workers' common command, with which the server is started."""
    env: Mapping[str, str]
    """Variables that libraries read during their import, beside the common environment."""
    bound_s: float | None
    """Longest time for the import of one module. Then the server is killed."""


class Spawn(Record):
    """Start one worker. Its descriptors accompany the frame."""

    rank: int
    descriptors: tuple[int, ...]
    """The descriptors' numbers in the worker, each below ``nofile``."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cpus: tuple[int, ...] | None
    terminal: bool
    """The worker's descriptors are a terminal, which becomes its controlling one."""
    read_ends: tuple[int, ...] = ()
    """Streams whose read ends follow, to be kept open. 1: stdout, 2: stderr, 0: progress."""


class Signal(Record):
    """Send a signal to workers: to their process, their group, or (KILL, STOP and CONT) their
    tree."""

    ranks: tuple[int, ...]
    signum: int
    scope: str
    caught_only: bool
    """Send the signal only to processes that catch it, because USR1, for example, would kill
    others."""


class EndLeftovers(Record):
    """Send TERM once to every process that exited workers have left, now and later."""

    asked: bool = False
    """A scheduler has already sent TERM to all processes that run now."""


class Sweep(Record):
    """Send ``Swept`` when no process of any worker remains, and before that ``LeftoversRemain``
    once.

    With ``kill``, kill the remaining processes.
    """

    kill: bool = False


class CoordinatorLost(Record):
    """The agent has lost the coordinator and ends the workers; after ``bound_s`` the spawner
    does."""

    bound_s: float


class ExitSpawner(Record):
    """Sweep, then exit."""


class Running(Record):
    """The spawner's first message."""

    pid: int


class Spawned(Record):
    """A worker's process exists."""

    rank: int
    pid: int


class SpawnFailed(Record):
    """A worker could not be started: ``step`` (fork, chdir, exec, ...) failed with ``errno``.

    No ``WorkerExit`` follows; the worker table makes one.
    """

    rank: int
    step: str
    errno: int


class Halted(Record):
    """A worker was stopped by a job-control signal."""

    rank: int
    signum: int


class Preloaded(Record):
    """The modules are imported. Workers are forked from now on."""


class StillPreloading(Record):
    """The import of ``module`` has taken ``elapsed_s`` so far. Empty: no import has begun."""

    module: str
    elapsed_s: float


class ModuleLeftOut(Record):
    """A module cannot be preloaded, so workers import it themselves."""

    module: str
    reason: str
    """The reason, for the user."""


class PreloadFailed(Record):
    """Workers start without preloading from now on. ``reason`` is for the user."""

    reason: str


class SignalReceived(Record):
    """The spawner received a signal, from a worker or from a program that signals all processes."""

    signum: int


class SpawnerFailed(Record):
    """The spawner exits because of an internal error."""

    text: str


class LeftoversRemain(Record):
    """These processes of exited workers still run. ``Swept`` follows when they have ended."""

    processes: Leftovers


class Swept(Record):
    """No process of the workers remains, except these pids, which are stuck in the kernel."""

    left: tuple[int, ...]
    ended: Leftovers = Leftovers()
    """The processes of exited workers that got TERM by ``EndLeftovers``, or KILL."""
    killed: Leftovers = Leftovers()
    """The processes of ``ended`` that got KILL."""


ToSpawner = Setup | Preload | Spawn | Signal | EndLeftovers | Sweep | CoordinatorLost | ExitSpawner
FromSpawner = (
    Running
    | Spawned
    | SpawnFailed
    | WorkerExit
    | Halted
    | StillPreloading
    | ModuleLeftOut
    | Preloaded
    | PreloadFailed
    | SignalReceived
    | SpawnerFailed
    | LeftoversRemain
    | Swept
)
TO_SPAWNER: tuple[type, ...] = (
    Setup,
    Preload,
    Spawn,
    Signal,
    EndLeftovers,
    Sweep,
    CoordinatorLost,
    ExitSpawner,
)
FROM_SPAWNER: tuple[type, ...] = (
    Running,
    Spawned,
    SpawnFailed,
    WorkerExit,
    Halted,
    StillPreloading,
    ModuleLeftOut,
    Preloaded,
    PreloadFailed,
    SignalReceived,
    SpawnerFailed,
    LeftoversRemain,
    Swept,
)
NESTED_TYPES: tuple[type, ...] = (Layout, LeftoverProcess, Leftovers)
"""Records that are fields of messages."""
