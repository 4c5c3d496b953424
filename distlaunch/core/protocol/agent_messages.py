"""Messages between the coordinator and the agent of one node.

An agent in a process of its own sends ``Hello`` first. Then follow, in this order: ``Survey``, per
attempt ``Prepare`` (the master's node also listens), ``Reach`` for the others, ``Start``; at the
end ``ExitAgent``. ``Ping`` is sent all the time. An agent in the launcher's process gets only the
messages of ``TO_AGENT``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from distlaunch.core.model.record import Record
from distlaunch.core.model.run_files import TRAIN, Layout
from distlaunch.core.model.topology import CpuInventory, Gpu, GpuInventory, MigDevice
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol.spawner_messages import LeftoverProcess, Leftovers

LATE_S = 2.0
"""If we wake so late ourselves (stopped, or frozen with the machine), others get so long to be
heard again."""
GREETING = b"\ndistlaunch-agent "
"""Before an agent's first frame: this, the launcher's random word for it, and a newline. What came
earlier (banners, what a shell's start-up files print) is no frame."""
PING_S = 2.0
"""How often the coordinator pings."""
SILENCE_S = 10.0
"""After so long without a word the network, or the peer, is taken for lost (design, section 5), on
both sides."""


# --- what messages are made of


SurveyPart = Literal["agent", "directory", "python", "script", "devices"]
"""What a survey looks at; ``agent`` is the survey itself."""


class WorkerSpec(Record):
    """One worker of a node. ``argv`` is None where it is the attempt's common one."""

    rank: int
    local_rank: int
    argv: tuple[str, ...] | None
    env: Mapping[str, str]
    cpus: tuple[int, ...] | None
    error_file: str | None


class Heartbeat(Record):
    """The newest numbers that a worker has reported on its progress descriptor: step, loss,
    samples, ..."""

    rank: int
    values: Mapping[str, float]


class Stack(Record):
    """Where a worker stood when it was asked."""

    rank: int
    pid: int
    state: str
    """The letter of its process state in ``/proc`` (R, S, D, T, t, Z); empty if it is gone."""
    text: str
    """Its threads' Python stacks as faulthandler prints them, innermost frame first (capped); empty
    if none came."""
    taken_s: float = 0.0
    """When it was asked, in seconds on its node's clock."""
    cpu_s: float = 0.0
    """Processor time that it had used by then, all its threads together."""
    children_cpu_s: float = 0.0
    """The same of its descendants. Those that hold a GPU count only if they are forks of the
    worker: other processes on a GPU may be ranks, which spin while they wait for each other."""
    holds_gpu: bool = False
    """It has a GPU open: processor time may be a wait for that GPU."""


class Interface(Record):
    """One address of a network interface that is up."""

    name: str
    address: str
    """Numeric, without a scope."""
    prefix: int
    """Bits of the network part."""


class Route(Record):
    """An address that a node has connected to, and by which interface of its own it did."""

    address: str
    local: str
    """Our end's address."""
    interface: str
    """Our end's interface; empty where the kernel does not tell."""


# --- coordinator to any agent


class Prepare(Record):
    """Settle what only the node knows; ``port`` is None (not the master's node), 0 (any) or a
    number."""

    attempt: int
    port: int | None
    token: str = ""
    """Until ``Start``, listen on the port and say this, and a newline, to whoever connects; empty:
    only hold it."""
    ports: int = 0
    """So many further ports are to be held, any that are free: for workers that listen
    themselves."""


class Start(Record):
    """Start the node's workers of this attempt."""

    attempt: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    workers: tuple[WorkerSpec, ...]
    uses_gpus: bool
    """Before another attempt is prepared, the driver must have taken back these workers' GPU
    memory."""
    signal_group: bool
    """Signals go to each worker's process group (``--no-python``), not to its own process only."""
    terminal: bool
    """The one worker gets a pseudo-terminal."""
    rows: int
    columns: int
    stdin_rank: int | None
    """The rank that inherits the agent's stdin."""
    preload: tuple[str, ...] = ()
    """Modules that a server imports once, from which workers are then forked."""
    preload_log: str = ""
    """The file for what their imports print."""
    preload_bound_s: float | None = None
    """How long the import of one of them may take before workers are started without."""
    watch: bool = False
    """The coordinator watches for hangs: tell it who is alive, and have the workers ready to show
    their stacks."""
    output_period_s: float = 1.0
    """While workers only write, tell it no more often."""
    bootstrap: str = ""
    """How our code comes into the workers' interpreter: ``direct``, by ``setup``'s shell, or
    (empty) not at all."""
    is_remote: bool = False
    """``env`` comes from another machine: what the node has itself (HOME, USER, ...) lies below it,
    and files that would be in a run directory that is not there go to a folder of the agent's own.
    """
    node_logs: str = ""
    """A folder on the node where each rank's output is filed as well; empty: none."""
    stdin_from_launcher: bool = False
    """The ``stdin_rank`` reads what ``StdinData`` brings, not the agent's own stdin."""
    store: bool = False
    """The master's node serves Horovod's store on the port that it holds."""
    orphan_grace_s: float | None = None
    """How long the workers may take to end by TERM if agent or coordinator vanish; None: as the
    agent has it."""
    shared_memory: tuple[str, ...] = ()
    """Names of the files that each worker may leave in /dev/shm, with {uid}, {address}, {port} and
    {rank} in them."""
    env_starts: Mapping[str, str] = {}
    """How variables begin that are as long as the job is large; what a worker has under the same
    name goes on there."""
    run_dir: str = ""
    """The job's run directory, where the node has it; whoever outlives the launcher goes on with
    the logs there."""
    layout: Layout = TRAIN
    """How the logs are called there."""

    def env_of(self, spec: WorkerSpec) -> Mapping[str, str]:
        """Return what one of the workers has beside ``env``."""
        return {
            **spec.env,
            **{name: start + spec.env.get(name, "") for name, start in self.env_starts.items()},
        }


class Stop(Record):
    """Ask all workers to end by ``signum``; after ``grace_s`` their trees get KILL (at once if it
    is 0).

    ``signum`` 0: somebody has asked them already.
    """

    attempt: int
    signum: int
    grace_s: float


class WaitForLeftovers(Record):
    """All workers of the job have ended with 0: wait for the processes that they have left.

    After ``linger_s`` these get TERM, and after another ``grace_s`` KILL.
    """

    attempt: int
    linger_s: float
    grace_s: float


class ForwardSignal(Record):
    """Pass a signal on to the workers that catch it."""

    signum: int


class Pause(Record):
    """Stop (SIGSTOP) all trees, or let them go on."""

    paused: bool


class CollectStacks(Record):
    """Answer with ``Stacks`` of all workers that run, within some 3 s."""

    attempt: int
    serial: int
    """Of this question; its answer repeats it, so that a late one is not taken for the next."""


class Input(Record):
    """Keystrokes for the worker's pseudo-terminal."""

    data: bytes


class Resize(Record):
    """The user's terminal has this size now."""

    rows: int
    columns: int


# --- coordinator to an agent in a process of its own


class Survey(Record):
    """Look around on this node; answered with ``Surveyed``, as often as it is asked."""

    serial: int
    workdir: str
    pythons: tuple[str, ...]
    """Interpreters for the workers, the first that can be run counts; empty if the workers are no
    Python."""
    script: str
    """Relative to ``workdir`` if it is not absolute; empty if no file is named (``-m``)."""
    program: str
    """The workers' program under ``--no-python``; empty otherwise."""
    run_dir: str
    """The job's folder, which nodes may share with the launcher."""
    gpus: bool
    topology: bool
    """CPUs with their NUMA nodes and cores, for ``--bind``."""


class Reach(Record):
    """Connect to the port that the master's node listens on, at each of these addresses; answered
    with ``Reached``."""

    attempt: int
    addresses: tuple[str, ...]
    """Numeric ones or names, the preferred first."""
    port: int
    token: str
    """What the right listener says at once (ASCII, and a newline): others may have the same
    address."""
    bound_s: float


class Ping(Record):
    """Answer with ``Pong``. An agent that hears nothing for ``SILENCE_S`` takes the coordinator for
    lost."""

    serial: int
    silence_s: float | None = None
    """It is to be so long instead, as the user wants it."""


class Credit(Record):
    """So many more bytes of output may be sent."""

    size: int


class StdinData(Record):
    """Bytes for the stdin of the rank that reads the launcher's stdin; no bytes: its end.

    The agent answers with ``StdinConsumed`` as the worker reads.
    """

    data: bytes


class ExitAgent(Record):
    """The job is over: kill what is left, and end."""


# --- any agent to coordinator


class Prepared(Record):
    """Answer to ``Prepare``: the port held for rank 0's store, or what stands in the way."""

    attempt: int
    port: int | None
    problem: str | None
    hint: str | None
    warning: str | None
    ports: tuple[int, ...] = ()
    """The further ports that are held."""


class Started(Record):
    """Processes exist for these ranks."""

    attempt: int
    pids: Mapping[int, int]


class WorkerHalted(Record):
    """A worker with a pseudo-terminal was stopped from it (Ctrl-Z)."""

    rank: int


class Alive(Record):
    """Signs of life since the last of these messages, of which there is at most one a second."""

    attempt: int
    heartbeats: tuple[Heartbeat, ...]
    """Of the workers that have sent some."""
    wrote: tuple[int, ...]
    """Ranks that wrote output (only while the coordinator watches for hangs)."""
    held: bool = False
    """Output was not taken, as whoever reads ours is slow: silent workers may only be waiting for
    that."""


class Stacks(Record):
    """Answer to ``CollectStacks``."""

    attempt: int
    serial: int
    stacks: tuple[Stack, ...]


class AgentNotice(Record):
    """Something that the user should hear; the job goes on."""

    text: str
    warning: bool


class PreloadEnded(Record):
    """The modules were imported after so long, or workers start the cold way from now on, with the
    ``problem``."""

    modules: tuple[str, ...]
    problem: str | None
    elapsed_s: float
    left_out: tuple[str, ...] = ()
    """Modules that could not be preloaded, beside those that were."""

    @property
    def fields(self) -> dict[str, object]:
        """Return what the job's record keeps of it."""
        return {
            "modules": list(self.modules),
            "left_out": list(self.left_out),
            "problem": self.problem,
            "elapsed_s": round(self.elapsed_s, 3),
        }


class LeftoversRunning(Record):
    """The node waits for these processes, which its workers have left; sent some time after
    ``WaitForLeftovers``."""

    attempt: int
    processes: Leftovers


class SpawnerSignalled(Record):
    """The workers' parent on this node got a signal, which is for the job."""

    signum: int


class AttemptEnded(Record):
    """Of this attempt nothing is left on the node, but for pids that KILL did not end."""

    attempt: int
    left: tuple[int, ...]
    ended: Leftovers = Leftovers()
    """Processes of ended workers that the node had to end, by TERM or KILL."""
    killed: Leftovers = Leftovers()
    """Those of them that needed KILL."""
    port_used: bool | None = None
    """Any process has used rank 0's port; None if it was not held for the workers on this node."""


class AgentFailed(Record):
    """The agent can no longer do its work; all its workers have been killed."""

    text: str


# --- an agent in a process of its own to coordinator


class Hello(Record):
    """The first word of an agent. ``clock`` is its own (seconds), which ``Pong`` and
    ``WorkerExit`` use."""

    hostname: str
    python: str
    """Its interpreter's version, as 3.11.4."""
    pid: int
    clock: float


class Surveyed(Record):
    """Answer to ``Survey``."""

    serial: int
    hostname: str
    environ: Mapping[str, str]
    """Device masks, and what else of its environment decides about devices."""
    interfaces: tuple[Interface, ...]
    named: tuple[str, ...]
    """The addresses that the node's own host name stands for, in the resolver's order; none if that
    took too long."""
    gpus: GpuInventory
    cpus: CpuInventory
    granted_cpus: int | None
    python: str | None
    """The first of the interpreters that is there."""
    script_sha256: str | None
    """Of the script (of a folder's ``__main__.py``); None if it is not there."""
    problem: str | None
    """Why workers cannot run here, as a clause: ``there is no directory /work``."""
    hint: str | None
    shares_run_dir: bool
    problem_part: Literal["agent", "directory", "python", "script", "devices"] = "agent"
    """What the problem lies with: the directory is the working directory, or that of the job."""
    """The job's folder, with the launcher's marker in it, is there as well."""
    machine: str = ""
    """Tells this machine, or container, from all others, whatever it is called; empty if it cannot
    be told."""


class Reached(Record):
    """Answer to ``Reach``: to which of the addresses this node has a way; ``problem`` says why to
    none."""

    attempt: int
    routes: tuple[Route, ...]
    problem: str | None


class Pong(Record):
    """Answer to ``Ping``; ``clock`` is the agent's own, when the ping came."""

    serial: int
    clock: float


class Output(Record):
    """What a worker wrote to its stream (1 or 2)."""

    rank: int
    stream: int
    data: bytes


class RankEnded(Record):
    """Nothing more comes of this rank's output in this attempt."""

    rank: int


class StdinConsumed(Record):
    """So many bytes of stdin were taken; more may be sent. ``closed``: nobody reads it any more.

    ``unread``: so many bytes that were sent will never be read.
    """

    size: int
    closed: bool
    unread: int = 0


class AgentEnding(Record):
    """The agent was told to end on its node, or has failed: it ends its workers and then itself,
    and says no more.

    The channel may stay open for as long: it is held by the shell that the agent was started from.
    """

    why: str
    """As a clause: ``the agent was told to end by signal 15``."""
    coordinator_silent: bool = False
    """It is because nothing was heard of the coordinator for too long."""


class AgentSignalled(Record):
    """An agent that a scheduler's step has started got a signal, which is for the job: it only
    passes it on."""

    signum: int


ToAgent = (
    Prepare
    | Start
    | Stop
    | WaitForLeftovers
    | ForwardSignal
    | Pause
    | CollectStacks
    | Input
    | Resize
)


FromAgent = (
    Prepared
    | Started
    | WorkerExit
    | WorkerHalted
    | Alive
    | Stacks
    | AgentNotice
    | PreloadEnded
    | LeftoversRunning
    | SpawnerSignalled
    | AttemptEnded
    | AgentFailed
)


ToRemote = ToAgent | Survey | Reach | Ping | Credit | StdinData | ExitAgent


FromRemote = (
    FromAgent
    | Hello
    | Surveyed
    | Reached
    | Pong
    | Output
    | RankEnded
    | StdinConsumed
    | AgentEnding
    | AgentSignalled
)


TO_AGENT: tuple[type, ...] = (
    Prepare,
    Start,
    Stop,
    WaitForLeftovers,
    ForwardSignal,
    Pause,
    CollectStacks,
    Input,
    Resize,
)


FROM_AGENT: tuple[type, ...] = (
    Prepared,
    Started,
    WorkerExit,
    WorkerHalted,
    Alive,
    Stacks,
    AgentNotice,
    PreloadEnded,
    LeftoversRunning,
    SpawnerSignalled,
    AttemptEnded,
    AgentFailed,
)


TO_REMOTE: tuple[type, ...] = (*TO_AGENT, Survey, Reach, Ping, Credit, StdinData, ExitAgent)


FROM_REMOTE: tuple[type, ...] = (
    *FROM_AGENT,
    Hello,
    Surveyed,
    Reached,
    Pong,
    Output,
    RankEnded,
    StdinConsumed,
    AgentEnding,
    AgentSignalled,
)


PARTS: tuple[type, ...] = (WorkerSpec, Heartbeat, Stack, Layout, LeftoverProcess, Leftovers)
"""What messages are made of."""


REMOTE_PARTS: tuple[type, ...] = (
    *PARTS,
    Interface,
    Route,
    Gpu,
    MigDevice,
    GpuInventory,
    CpuInventory,
)
