"""Messages between the coordinator and the agent of one node.

An agent that is a separate process sends ``Hello`` first. Then the coordinator sends, in this
order: ``Survey``; for each attempt ``Prepare`` (the master's node then listens), ``Reach`` to the
other nodes, and ``Start``; at the end ``ExitAgent``. It sends ``Ping`` regularly. An agent in the
launcher's own process gets only the messages of ``TO_AGENT``.
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
"""After this process was suspended, others have this long to send a message before they count as
lost."""
GREETING = b"\ndistlaunch-agent "
"""Precedes an agent's first frame, followed by the launcher's random token and a newline. Earlier
bytes (banners, output of a shell's start-up files) are ignored."""
PING_S = 2.0
"""How often the coordinator sends ``Ping``."""
LOG_PART_BYTES = 240_000
"""Most bytes of a ``LogPart``: a whole number of records of the index of times."""
SILENCE_S = 10.0
"""After this long without a message, each side considers the other lost."""


# --- parts of messages


SurveyPart = Literal["agent", "directory", "python", "script", "devices"]
"""Parts of a survey, for timeouts. ``agent`` is the survey's process itself."""


class WorkerSpec(Record):
    """One worker of a node. ``argv`` is None if the command of ``Start`` applies."""

    rank: int
    local_rank: int
    argv: tuple[str, ...] | None
    env: Mapping[str, str]
    cpus: tuple[int, ...] | None
    error_file: str | None


class Heartbeat(Record):
    """The latest numbers (step, loss, samples, ...) on a worker's progress descriptor."""

    rank: int
    values: Mapping[str, float]


class SavedCheckpoint(Record):
    """A checkpoint that a worker has reported as complete on its progress descriptor."""

    rank: int
    step: int
    """The number of done steps, with which a resumed job continues."""
    seconds: float
    """How long it took to write it."""
    bytes: int


class ProcessGroup(Record):
    """A process group of torch.distributed, as a worker sees it. Collectives are counted from 1."""

    number: str
    """torch's name of the group, which is a number and the same in all workers."""
    name: str
    """Description of the group; empty if not known."""
    enqueued: int
    """The last collective that the worker has begun; 0 or -1 if none."""
    pending: int | None
    """The oldest collective that has not ended; None if there is none."""
    operation: str
    """What the pending collective does: ``all_reduce``."""
    sizes: str
    """Shapes of its tensors as JSON: ``[[7, 8]]``."""


class Stack(Record):
    """The stacks of a worker at the time of ``CollectStacks``."""

    rank: int
    pid: int
    state: str
    """Letter of the process state in ``/proc`` (R, S, D, T, t, Z); empty after its end."""
    text: str
    """Python stacks of the worker's threads by faulthandler, most recent call first, limited in
    size. Empty if the worker wrote none."""
    taken_s: float = 0.0
    """Time of the request, in seconds on the node's clock."""
    cpu_s: float = 0.0
    """Processor time in seconds of all threads of the worker."""
    children_cpu_s: float = 0.0
    """Processor time of the worker's descendants. One that holds a GPU counts only if it is a fork
    of the worker: other processes on a GPU may be ranks, which use processor time while they
    wait."""
    source: str = ""
    """The line of source at the innermost frame of the main thread, if read in time."""
    holds_gpu: bool = False
    """The worker has opened a GPU, so its processor time may be spent waiting for it."""
    native: str = ""
    """Stacks with native frames as py-spy prints them, most recent call first, limited in size."""
    process_groups: tuple[ProcessGroup, ...] = ()
    """Empty if they were not asked for, or if the worker has none."""


class WorkerUsage(Record):
    """What a worker and its descendants use. Sums over these processes, unless it says otherwise."""

    rank: int
    pid: int
    """Of the worker itself."""
    age_s: float
    """Time since the worker's process started."""
    processes: int
    cpu_s: float
    """Processor time until now, with that of descendants that have ended."""
    rss_bytes: int
    """Resident memory. Pages that processes share count for each of them."""
    gpus: tuple[int, ...] = ()
    """Indices of the GPUs that these processes use, as far as known."""
    gpu_percent: float | None = None
    """How busy these GPUs are, as a mean. Other processes on them count, too."""
    gpu_bytes: int | None = None
    """Memory of these GPUs that the processes hold, or all that is in use if the driver does not
    say by process."""


class LogInfo(Record):
    """A log file of a rank on a node."""

    rank: int
    stream: int
    """STDOUT or STDERR; 0 for a file with both."""
    size: int
    gap_begin: int
    """Where the file has left out bytes (``--log-max-size``); -1 if it has not."""
    left_out: int
    """How many bytes it has left out there."""


class InterfaceUsage(Record):
    """Bytes that a network interface has carried since it exists."""

    name: str
    received_bytes: int
    sent_bytes: int


class Interface(Record):
    """An address of a network interface that is up."""

    name: str
    address: str
    """Numeric, without a scope."""
    prefix: int
    """Length of the network prefix in bits."""


class Route(Record):
    """An address to which a node has connected, and the local end of that connection."""

    address: str
    local: str
    """Address of the local end."""
    interface: str
    """Interface of the local end; empty if unknown."""


# --- coordinator to any agent


class Prepare(Record):
    """Reserve ports for an attempt. Answered with ``Prepared``.

    ``port`` is the port for rank 0 on the master's node, 0 for any free port, and None on other
    nodes.
    """

    attempt: int
    port: int | None
    token: str = ""
    """Until ``Start``, the node listens on the port and sends this token and a newline to each
    client. Empty: it does not listen."""
    ports: int = 0
    """Number of further ports to reserve, for workers that listen themselves."""


class Start(Record):
    """Start the node's workers of this attempt."""

    attempt: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    workers: tuple[WorkerSpec, ...]
    uses_gpus: bool
    """Before the next attempt, the agent waits until the driver has released these workers' GPU
    memory."""
    signal_group: bool
    """Signals go to each worker's process group (``--no-python``), not only to its process."""
    terminal: bool
    """The node's one worker gets a pseudo-terminal."""
    rows: int
    columns: int
    stdin_rank: int | None
    """The rank that inherits the agent's stdin, or gets ``StdinData``."""
    preload: tuple[str, ...] = ()
    """Modules that a preload server imports once before it forks the workers."""
    preload_log: str = ""
    """File for the output of these imports."""
    preload_bound_s: float | None = None
    """Longest time for the import of one module. Then workers start without preloading."""
    watch: bool = False
    """Whether the coordinator detects hangs. The agent then sends ``Alive``, and workers can write
    their stacks."""
    output_period_s: float = 1.0
    """Shortest time between two ``Alive`` that report only output."""
    bootstrap: str = ""
    """How distlaunch's code is loaded into the workers' interpreter: ``direct``, ``setup`` (by a
    shell), or not at all (empty)."""
    is_remote: bool = False
    """Whether ``env`` is from another machine. The node's own values (HOME, USER, ...) complete it,
    and files for a run directory that the node does not share go to the agent's temporary
    directory."""
    node_logs: str = ""
    """Directory on the node for an additional log of each rank; empty: none."""
    stdin_from_launcher: bool = False
    """``stdin_rank`` reads the ``StdinData`` of the coordinator, not the agent's own stdin."""
    store: bool = False
    """Whether the master's node serves Horovod's store on the reserved port."""
    orphan_grace_s: float | None = None
    """Time between TERM and KILL if agent or coordinator vanish. None: the agent's default."""
    shared_memory: tuple[str, ...] = ()
    """Names of files that a worker may leave in /dev/shm, with {uid}, {address}, {port} and
    {rank}."""
    env_starts: Mapping[str, str] = {}
    """Beginnings of variables whose length grows with the job. A worker's own value is appended."""
    run_dir: str = ""
    """Run directory of the job. If the node has it and the launcher dies, the spawner continues the
    logs there."""
    layout: Layout = TRAIN
    """Names of the files in ``run_dir``."""

    def env_of(self, spec: WorkerSpec) -> Mapping[str, str]:
        """Return the variables of a worker beside ``env``."""
        return {
            **spec.env,
            **{name: start + spec.env.get(name, "") for name, start in self.env_starts.items()},
        }


class Stop(Record):
    """Send ``signum`` to all workers, and kill their process trees after ``grace_s``, which may be
    0.

    ``signum`` is 0 if another program has already sent the signal.
    """

    attempt: int
    signum: int
    grace_s: float


class WaitForLeftovers(Record):
    """All workers of the job have exited with 0: wait for the processes that they have left.

    They get TERM after ``linger_s``, and KILL after another ``grace_s``.
    """

    attempt: int
    linger_s: float
    grace_s: float


class ForwardSignal(Record):
    """Send a signal to the workers that catch it."""

    signum: int


class Pause(Record):
    """Suspend all workers' process trees by SIGSTOP, or resume them."""

    paused: bool


class CollectStacks(Record):
    """Answer within about 3 s with the ``Stacks`` of all running workers."""

    attempt: int
    serial: int
    """Repeated in the answer, to recognise a late one."""
    for_user: bool = False
    """A user has asked. The answer has the process groups, too."""
    native: bool = False
    """The answer has native frames, too, if py-spy is installed. It may take about 10 s then."""


class ReadUsage(Record):
    """Answer within about 2 s with the ``Usage`` of the node and of all running workers."""

    attempt: int
    serial: int
    """Number repeated in the answer."""


class ListLogs(Record):
    """Answer with the ``LogList`` of these ranks' log files on the node."""

    serial: int
    attempt: int
    ranks: tuple[int, ...]
    directory: str = ""
    """The job's directory below that of ``--node-logs``. Empty for a launcher, which reads its own
    run directory."""
    log_bytes: int = 0
    """Size of a log from which its middle is left out; 0: there is no limit."""


class ReadLog(Record):
    """Answer with a ``LogPart``: these bytes of a log file, at most ``LOG_PART_BYTES``."""

    serial: int
    attempt: int
    rank: int | None
    """None: the index of times of the node's log files."""
    stream: int
    """As in ``LogInfo``."""
    offset: int
    size: int
    directory: str = ""
    """As in ``ListLogs``."""


class Input(Record):
    """Keystrokes for the worker's pseudo-terminal."""

    data: bytes


class Resize(Record):
    """The user's terminal has changed its size."""

    rows: int
    columns: int


# --- coordinator to an agent in a process of its own


class Survey(Record):
    """Report the properties and resources of this node. Answered with ``Surveyed``; may be
    repeated."""

    serial: int
    workdir: str
    pythons: tuple[str, ...]
    """Interpreters for the workers; the first that can be executed is used. Empty if workers are
    not Python."""
    script: str
    """Path, relative to ``workdir``; empty for ``-m``."""
    program: str
    """The program of the workers under ``--no-python``."""
    run_dir: str
    """Run directory of the job. The node may share it."""
    gpus: bool
    topology: bool
    """Read NUMA nodes and cores of the CPUs, for ``--bind``."""


class Reach(Record):
    """Connect to the master's port at each of these addresses. Answered with ``Reached``."""

    attempt: int
    addresses: tuple[str, ...]
    """Addresses or names, the preferred ones first."""
    port: int
    token: str
    """ASCII text that the right listener sends at once, followed by a newline: another machine may
    have the same address."""
    bound_s: float


class Ping(Record):
    """Answer with ``Pong``. An agent that gets no message for ``SILENCE_S`` considers the
    coordinator lost.
    """

    serial: int
    silence_s: float | None = None
    """The user's value for ``SILENCE_S``."""


class Credit(Record):
    """The agent may send this many more bytes of output."""

    size: int


class StdinData(Record):
    """Bytes for the rank that reads the launcher's stdin; empty bytes are the end.

    The agent answers with ``StdinConsumed`` when the worker's stdin has taken bytes.
    """

    data: bytes


class ExitAgent(Record):
    """The job has ended. Kill all remaining processes and exit."""


# --- any agent to coordinator


class Prepared(Record):
    """Answer to ``Prepare``: the port for rank 0's store, or why there is none."""

    attempt: int
    port: int | None
    problem: str | None
    hint: str | None
    """None if the only advice is to choose no port; the launcher gives it."""
    warning: str | None
    ports: tuple[int, ...] = ()


class Started(Record):
    """The processes of these ranks exist: rank -> pid."""

    attempt: int
    pids: Mapping[int, int]


class WorkerHalted(Record):
    """A worker with a pseudo-terminal was stopped by Ctrl-Z."""

    rank: int


class Alive(Record):
    """Activity of workers since the previous message, at most once a second."""

    attempt: int
    heartbeats: tuple[Heartbeat, ...]
    """The last report of each worker that has reported progress."""
    wrote: tuple[int, ...]
    """Ranks that wrote output (only if the coordinator detects hangs)."""
    held: bool = False
    """A slow reader held back output. Workers may be silent only because of that."""
    checkpoints: tuple[SavedCheckpoint, ...] = ()


class Stacks(Record):
    """Answer to ``CollectStacks``."""

    attempt: int
    serial: int
    stacks: tuple[Stack, ...]


class Usage(Record):
    """Answer to ``ReadUsage``. Counters only grow; two answers give a rate."""

    attempt: int
    serial: int
    clock_s: float
    """When the figures were read, on the node's monotonic clock."""
    agent_cpu_s: float
    """Processor time of the agent's process. On one machine that is the launcher."""
    cpus: int
    """Processors that the node has online."""
    memory_bytes: int
    available_bytes: int
    """Memory that processes could still get without swapping."""
    interfaces: tuple[InterfaceUsage, ...]
    """The interfaces to other machines."""
    read_bytes: int
    """Bytes that the node's disks have read."""
    written_bytes: int
    workers: tuple[WorkerUsage, ...]


class LogList(Record):
    """Answer to ``ListLogs``. It may lack ranks that have no file."""

    serial: int
    files: tuple[LogInfo, ...]
    index_bytes: int
    """Size of the index of times; 0 if there is none."""
    problem: str | None = None
    """Why the files cannot be listed, as a clause."""


class LogPart(Record):
    """Answer to ``ReadLog``. Fewer bytes than were asked for mean the end of the file."""

    serial: int
    data: bytes
    problem: str | None = None
    """Why the file cannot be read, as a clause."""


class AgentNotice(Record):
    """A line for the user. The job continues."""

    text: str
    warning: bool


class PreloadEnded(Record):
    """Preloading has ended. With ``problem``, workers start without it."""

    modules: tuple[str, ...]
    problem: str | None
    elapsed_s: float
    left_out: tuple[str, ...] = ()
    """Modules that could not be preloaded, although others could."""

    @property
    def fields(self) -> dict[str, object]:
        """The fields for the event in the job's record."""
        return {
            "modules": list(self.modules),
            "left_out": list(self.left_out),
            "problem": self.problem,
            "elapsed_s": round(self.elapsed_s, 3),
        }


class LeftoversRunning(Record):
    """Sent some time after ``WaitForLeftovers``: the node waits for these processes."""

    attempt: int
    processes: Leftovers


class SpawnerSignalled(Record):
    """The spawner of this node received a signal that is meant for the job."""

    signum: int


class AttemptEnded(Record):
    """No process of this attempt is left on the node, except the pids in ``left``, which KILL did
    not end."""

    attempt: int
    left: tuple[int, ...]
    ended: Leftovers = Leftovers()
    """Processes left by exited workers that TERM or KILL ended."""
    killed: Leftovers = Leftovers()
    """Those of ``ended`` that needed KILL."""
    port_used: bool | None = None
    """Whether a process has used rank 0's port; None if none was reserved on this node."""


class AgentFailed(Record):
    """The agent cannot continue, and has killed all its workers."""

    text: str


# --- an agent in a process of its own to coordinator


class Hello(Record):
    """First message of an agent. ``clock`` is its time in seconds, also used by ``Pong`` and
    ``WorkerExit``."""

    hostname: str
    python: str
    """Version of the agent's interpreter, such as 3.11.4."""
    pid: int
    clock: float


class Surveyed(Record):
    """Answer to ``Survey``."""

    serial: int
    hostname: str
    environ: Mapping[str, str]
    """Device masks and other variables of the node that affect devices."""
    interfaces: tuple[Interface, ...]
    named: tuple[str, ...]
    """The addresses of the node's host name in the resolver's order; empty if the lookup took too
    long."""
    gpus: GpuInventory
    cpus: CpuInventory
    granted_cpus: int | None
    python: str | None
    """The first of the requested interpreters that exists."""
    script_sha256: str | None
    """Hash of the script (of a directory's ``__main__.py``); None if it does not exist."""
    problem: str | None
    """Why workers cannot run here, as a clause: ``there is no directory /work``."""
    hint: str | None
    shares_run_dir: bool
    """Whether the node sees the run directory with the launcher's marker."""
    problem_part: Literal["agent", "directory", "python", "script", "devices"] = "agent"
    """The part of the survey with the problem. ``directory``: the working or the run directory."""
    machine: str = ""
    """Id of this machine or container, independent of its name; empty if unknown."""


class Reached(Record):
    """Answer to ``Reach``: the addresses that this node can connect to, or why there are none."""

    attempt: int
    routes: tuple[Route, ...]
    problem: str | None


class Pong(Record):
    """Answer to ``Ping``. ``clock`` is the agent's time at the arrival of the ping."""

    serial: int
    clock: float


class Output(Record):
    """Output of a worker on stream 1 or 2."""

    rank: int
    stream: int
    data: bytes


class RankEnded(Record):
    """The output of this rank in this attempt is complete."""

    rank: int


class StdinConsumed(Record):
    """The worker's stdin has taken ``size`` bytes, so the coordinator may send more.

    ``closed``: the worker has closed its stdin. ``unread`` counts bytes that will never be read.
    """

    size: int
    closed: bool
    unread: int = 0


class AgentEnding(Record):
    """The agent was stopped on its node, or has failed. It ends its workers and exits.

    This is its last message. The connection may stay open, because the shell that started the agent
    holds it.
    """

    why: str
    """The reason as a clause: ``the agent was ended by signal 15``."""
    coordinator_silent: bool = False
    """Whether the coordinator has sent no message for too long."""


class AgentSignalled(Record):
    """An agent of a scheduler's step received a signal for the job, which it only reports."""

    signum: int


ToAgent = (
    Prepare
    | Start
    | Stop
    | WaitForLeftovers
    | ForwardSignal
    | Pause
    | CollectStacks
    | ReadUsage
    | ListLogs
    | ReadLog
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
    | Usage
    | LogList
    | LogPart
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
    ReadUsage,
    ListLogs,
    ReadLog,
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
    Usage,
    LogList,
    LogPart,
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


NESTED_TYPES: tuple[type, ...] = (
    WorkerSpec,
    Heartbeat,
    SavedCheckpoint,
    ProcessGroup,
    Stack,
    WorkerUsage,
    InterfaceUsage,
    LogInfo,
    Layout,
    LeftoverProcess,
    Leftovers,
)
"""Records that are fields of messages."""


REMOTE_NESTED_TYPES: tuple[type, ...] = (
    *NESTED_TYPES,
    Interface,
    Route,
    Gpu,
    MigDevice,
    GpuInventory,
    CpuInventory,
)
