"""Messages between an agent and its spawner (the parent of the node's workers)."""

from __future__ import annotations

from collections.abc import Mapping

from distlaunch.core.model.record import Record
from distlaunch.core.model.run_files import TRAIN, Layout
from distlaunch.core.model.worker_exit import WorkerExit

SCOPE_PROCESS = "process"
SCOPE_GROUP = "group"
SCOPE_TREE = "tree"


class LeftoverProcess(Record):
    """A process that an ended worker has left running."""

    rank: int | None
    """Of the worker that it stems from; None if neither its session nor its environment tells."""
    pid: int
    command: str
    """Its argument list in one line, shortened."""


class Leftovers(Record):
    """Processes that ended workers have left running."""

    count: int = 0
    shown: tuple[LeftoverProcess, ...] = ()
    """The first of them."""


class Setup(Record):
    """What all workers of an attempt share."""

    env: Mapping[str, str]
    cwd: str
    cookie: str
    nofile: int
    """Soft limit of open files to give them: the one the launcher was started with."""
    signal_group: bool
    """They are asked to end by their process group, also when the agent has vanished."""
    job_id: str = ""
    """Shown in the spawner's title, if it was not known before."""
    orphan_grace_s: float | None = None
    """How long they may take to end by TERM if the agent vanishes; None: what the spawner was
    started with."""
    temporary_dir: str = ""
    """The agent's own folder, to be removed after all if it vanishes."""
    shared_memory: tuple[str, ...] = ()
    """Names of the files in /dev/shm that they may leave there, to be removed when the last of them
    is gone."""
    attempt: int = 0
    log_dir: str = ""
    """The run directory in which the spawner goes on with the ranks' logs if the agent vanishes;
    empty: nowhere."""
    layout: Layout = TRAIN
    """How the logs are called there."""


class Preload(Record):
    """Have a server import modules once and fork all further workers from it.

    ``Preloaded`` answers, or ``PreloadFailed``, which may also come later, at any time after
    ``Preloaded``: the server has gone. While the imports take long, ``StillPreloading`` says so;
    ``ModuleLeftOut`` tells of a module that cannot be preloaded. One descriptor travels beside the
    frame: where the server writes. The environment is that of the last ``Setup``.
    """

    modules: tuple[str, ...]
    argv: tuple[str, ...]
    """The workers' common command, with which the server itself is started."""
    env: Mapping[str, str]
    """What it has on top of the common environment: the workers' own variables that a library reads
    as it loads."""
    bound_s: float | None
    """How long the import of one module may take before the server is given up."""


class Spawn(Record):
    """Start one worker; its descriptors travel beside the frame."""

    rank: int
    descriptors: tuple[int, ...]
    """The numbers that they are to have in the worker, one after the other, each below
    ``nofile``."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cpus: tuple[int, ...] | None
    terminal: bool
    """Its descriptors are a terminal that it is to have as controlling terminal."""
    read_ends: tuple[int, ...] = ()
    """Streams whose read ends travel behind its descriptors, for the spawner to keep: 1, 2, and 0
    for progress."""


class Signal(Record):
    """Send a signal to workers: their own process, their process group, or (KILL, STOP, CONT) their
    whole tree."""

    ranks: tuple[int, ...]
    signum: int
    scope: str
    caught_only: bool
    """Only to processes that catch it: an uncaught USR1 would kill."""


class EndLeftovers(Record):
    """Send TERM once to each process that ended workers have left, and to what workers leave from
    now on."""

    asked: bool = False
    """All processes that run now have had TERM already, from a scheduler."""


class Sweep(Record):
    """Answer ``Swept`` as soon as nothing is left of any worker; until then answer ``LeftoversRemain``
    once.

    ``kill``: kill what is left instead of waiting for it.
    """

    kill: bool = False


class CoordinatorLost(Record):
    """The agent has seen the end of its channel and ends the workers itself, within this time; else
    you do."""

    bound_s: float


class ExitSpawner(Record):
    """End in good order: sweep, then exit."""


class Running(Record):
    """The spawner is there: the first that it says."""

    pid: int


class Spawned(Record):
    """A worker's process exists."""

    rank: int
    pid: int


class SpawnFailed(Record):
    """A worker could not be started: ``step`` (fork, chdir, exec, ...) failed with ``errno``.

    Not a ``WorkerExit``, as there was no process. The worker table makes one of it.
    """

    rank: int
    step: str
    errno: int


class Halted(Record):
    """A worker was stopped by a job-control signal."""

    rank: int
    signum: int


class Preloaded(Record):
    """The modules are imported; workers are forked from now on."""


class StillPreloading(Record):
    """A remark: after so long this module is still being imported; empty: not even the first has
    been begun."""

    module: str
    elapsed_s: float


class ModuleLeftOut(Record):
    """A module cannot be preloaded; workers import it themselves. The other modules are still
    preloaded."""

    module: str
    reason: str
    """For the user."""


class PreloadFailed(Record):
    """Workers are, from now on, started the cold way; ``reason`` says why, for the user."""

    reason: str


class SignalReceived(Record):
    """The spawner got a signal: of a worker that signals its parent, or of whoever signals all
    processes at once."""

    signum: int


class SpawnerFailed(Record):
    """The spawner cannot go on, through a fault of ours; its end follows."""

    text: str


class LeftoversRemain(Record):
    """These processes of ended workers still run. ``Swept`` follows when they are gone."""

    processes: Leftovers


class Swept(Record):
    """Nothing is left, except these pids that KILL did not end (a process wedged in the kernel)."""

    left: tuple[int, ...]
    ended: Leftovers = Leftovers()
    """The processes of ended workers that got TERM by ``EndLeftovers``, or KILL."""
    killed: Leftovers = Leftovers()
    """Those of them that got KILL."""


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
PARTS: tuple[type, ...] = (Layout, LeftoverProcess, Leftovers)
"""What messages are made of."""
