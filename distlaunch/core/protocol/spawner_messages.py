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
    """The rank of the worker from which the process descends; None if neither the process's session
    nor its environment shows the rank."""
    pid: int
    command: str
    """The process's argument list on one line, shortened."""


class Leftovers(Record):
    """Processes that exited workers have left running."""

    count: int = 0
    shown: tuple[LeftoverProcess, ...] = ()
    """The first few processes."""


class Setup(Record):
    """The values that all workers of an attempt share."""

    env: Mapping[str, str]
    cwd: str
    cookie: str
    nofile: int
    """The workers' soft limit of open files: the limit with which the launcher was started."""
    signal_group: bool
    """Stop signals go to the workers' process groups, even if the agent has vanished."""
    job_id: str = ""
    """Job id for the spawner's process title, if the id was not known when the spawner started."""
    orphan_grace_s: float | None = None
    """Time between TERM and KILL if the agent vanishes. None: the spawner's default."""
    temporary_dir: str = ""
    """The agent's temporary directory. The spawner removes it if the agent vanishes."""
    shared_memory: tuple[str, ...] = ()
    """Names of files that the workers may leave behind in /dev/shm. The spawner removes them after
    the last worker has exited."""
    attempt: int = 0
    log_dir: str = ""
    """Run directory in which the spawner continues the logs if the agent vanishes; empty: no logs.
    """
    layout: Layout = TRAIN
    """Names of the files in ``log_dir``."""


class Preload(Record):
    """Start a preload server, which imports modules once. All further workers are forked from the
    server.

    The spawner sends ``Preloaded`` or ``PreloadFailed``. ``PreloadFailed`` may also follow
    ``Preloaded`` at any time, if the server has ended. ``StillPreloading`` reports slow imports,
    and ``ModuleLeftOut`` a module that cannot be preloaded. One descriptor accompanies the frame,
    for the server's output. The server has the environment of the last ``Setup``.
    """

    modules: tuple[str, ...]
    argv: tuple[str, ...]
    """The workers' common command, with which the server itself is started."""
    env: Mapping[str, str]
    """Variables in addition to the common environment: variables of workers that libraries read
    during their import."""
    bound_s: float | None
    """Longest time for the import of one module. After this time the server is killed."""


class Spawn(Record):
    """Start one worker. Its descriptors accompany the frame."""

    rank: int
    descriptors: tuple[int, ...]
    """The descriptors' numbers in the worker, in the same order, each below ``nofile``."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cpus: tuple[int, ...] | None
    terminal: bool
    """The worker's descriptors are a terminal, which becomes its controlling terminal."""
    read_ends: tuple[int, ...] = ()
    """Streams whose read ends follow the worker's descriptors. The spawner keeps them open. 1:
    stdout, 2: stderr, 0: progress."""


class Signal(Record):
    """Send a signal to workers: to their process, their process group, or their whole tree.

    The last is possible with KILL, STOP and CONT.
    """

    ranks: tuple[int, ...]
    signum: int
    scope: str
    caught_only: bool
    """Send the signal only to processes that catch it. USR1, for example, kills a process that does
    not catch it."""


class EndLeftovers(Record):
    """Send TERM once to every process that exited workers have left behind, now and later."""

    asked: bool = False
    """A scheduler has already sent TERM to all processes that run now."""


class Sweep(Record):
    """Send ``Swept`` when no process of any worker remains. Before that, send ``LeftoversRemain``
    once.

    With ``kill``, kill the remaining processes instead of waiting for them.
    """

    kill: bool = False


class CoordinatorLost(Record):
    """The agent has lost the coordinator and is ending the workers. If they have not ended after
    ``bound_s``, the spawner ends them."""

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

    The spawner sends no ``WorkerExit`` for the worker; the worker table makes one.
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
    """The import of ``module`` has taken ``elapsed_s`` so far. An empty name means that no import
    has begun."""

    module: str
    elapsed_s: float


class ModuleLeftOut(Record):
    """A module cannot be preloaded, so workers import it themselves. The other modules are
    preloaded."""

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
    """These processes of exited workers still run. ``Swept`` follows when all of them have
    ended."""

    processes: Leftovers


class Swept(Record):
    """No process of the workers remains, except these pids. KILL did not end them, because they are
    stuck in the kernel."""

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
