"""What passes between the launchers of one job, one on each node (or for each worker), over TCP.

A peer never executes what it is told: what runs comes from its own command line. Messages carry
numbers, addresses, names of hosts, and verdicts as text for people.

The caller sends ``Call``, the listener ``Challenge``, the caller ``Proof`` (empty without a
secret), and the listener ``Welcome`` or ``Rejected``, with its own proof; see ``handshake``. What
follows is the supervision of ``messages`` and ``remote``, without what would carry commands:
``SurveyNode`` stands for Survey, ``StartWorkers`` for Start.
"""

from __future__ import annotations

from distlaunch.core.errors import ProtocolError
from distlaunch.core.model.record import Record
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m

PROTOCOL_VERSION = 3
MOST_ATTEMPTS = 1 << 20
"""With one a second, that is twelve days."""


def may_have_had(attempt: int, restarts: int) -> bool:
    """Return whether a launcher can have come so far, and another attempt can follow; ``attempt`` -1:
    it has had none."""
    return -1 <= attempt < MOST_ATTEMPTS and 0 <= restarts <= max(0, attempt)


def may_start(attempt: int, restarts: int = 0) -> bool:
    """Return whether a coordinator can have come to this attempt."""
    return attempt >= 0 and may_have_had(attempt - 1, 0) and 0 <= restarts <= attempt


class Call(Record):
    """A launcher (or an agent that srun has started) wants to take part."""

    version: int
    release: str
    """Of distlaunch, as 0.1.0: all launchers of a job have the same."""
    job_key: str
    """What all launchers of one job share and others do not: the scheduler's job id, or --job-id;
    may be empty."""
    rank: int | None
    """Its node rank (of a launcher for each worker: its rank); None: whoever is next."""
    host: str
    instance: str
    """Random, of this launcher: one that calls again is known by it."""
    nonce: str
    """Hexadecimal; the listener proves itself with it."""
    scrypt: bool = True
    """The caller's Python has ``hashlib.scrypt``."""


class Challenge(Record):
    """The listener's answer, which says how the caller has to prove itself."""

    nonce: str
    way: str
    """Of the names in ``keys``: how the key of both proofs is made."""
    salt: str
    """From which it is made: hexadecimal, or a credential of munge; empty if it is not needed."""


class Proof(Record):
    """HMAC-SHA256(key, "caller" nonce-of-the-challenge nonce-of-the-call), hexadecimal; empty
    without a secret."""

    proof: str


class Rejected(Record):
    """The caller cannot take part. ``again``: it may be otherwise in a moment."""

    text: str
    hint: str | None
    exit_code: int
    again: bool
    proof: str = ""
    """As in ``Welcome``; empty if the caller has not proved itself."""


class Welcome(Record):
    """The caller takes part."""

    job_id: str
    rank: int
    """Its member number."""
    folder: str = ""
    """The name of the job's folder, where that is not its id."""
    proof: str = ""
    """HMAC-SHA256(key, "listener" nonce-of-the-call nonce-of-the-challenge), hexadecimal; empty
    without a secret."""


class LauncherInfo(Record):
    """What a launcher has to say of itself, right after ``Welcome``; contradictions are found by
    the coordinator."""

    num_nodes: tuple[int, ...]
    """Smallest and largest, as it was told."""
    slots: int | None
    """Workers that it was asked to run."""
    command: str
    """SHA-256 of what it was asked to run (argv without paths of interpreters), to compare only."""
    backend: str
    """The name of its backend."""
    choices: str
    """SHA-256 of the backend's options that were given, to compare only."""
    clock: float
    """Its own (seconds), which ``Pong`` and ``WorkerExit`` use."""
    wall: float
    """Seconds since the epoch, to find clocks that are far off."""
    attempt: int
    """The highest attempt that it knows of: a coordinator that came back goes on from there; -1:
    none."""
    restarts: int

    def __post_init__(self) -> None:
        """Refuse what no job can have come to: a coordinator counts on from it."""
        if len(self.num_nodes) != 2 or not may_have_had(self.attempt, self.restarts):
            raise ProtocolError("it tells of numbers of nodes, attempts or restarts that cannot be")


class SurveyNode(Record):
    """Look around, as ``Survey``, but by what your own command line names."""

    serial: int


class StartWorkers(Record):
    """Start your workers of this attempt."""

    attempt: int
    restarts: int
    node_rank: int
    local_ranks: tuple[int, ...]
    """Which of the node's workers are this launcher's; all of them but with a launcher for each
    worker."""
    hosts: tuple[str, ...]
    """By node rank."""
    slots: tuple[int, ...]
    """Workers, by node rank."""
    master_addr: str
    master_port: int
    interface: str
    """What to reach the others by, if that needs saying (GLOO_SOCKET_IFNAME); else empty."""
    nccl_interface: str = ""
    """The same for NCCL."""
    cluster: tuple[str, ...] = ()
    """``HOST:PORT`` by rank, where the backend tells workers of one another's ports: as many for
    each."""


class LauncherSignalled(Record):
    """This launcher has got a signal."""

    signum: int


class ExitLauncher(Record):
    """The job is over: leave with this exit code; ``text`` is for the user, on the launcher's last
    lines."""

    exit_code: int
    text: str
    summary: str = ""
    """Why the job has failed, in one sentence, for the error file; empty if it has not."""
    is_error: bool = False
    """``text`` reports an error; else it is the last line of a job that was stopped."""


class Notice(Record):
    """A line for the user, on every node."""

    text: str
    level: str


ToLauncher = (
    m.Prepare
    | m.Stop
    | m.WaitForLeftovers
    | m.ForwardSignal
    | m.Pause
    | m.CollectStacks
    | m.Reach
    | m.Ping
    | Challenge
    | Rejected
    | Welcome
    | SurveyNode
    | StartWorkers
    | ExitLauncher
    | Notice
)
FromLauncher = (
    m.Prepared
    | m.Started
    | WorkerExit
    | m.Alive
    | m.Stacks
    | m.AgentNotice
    | m.PreloadEnded
    | m.LeftoversRunning
    | m.AttemptEnded
    | m.AgentFailed
    | m.Surveyed
    | m.Reached
    | m.Pong
    | m.AgentEnding
    | Call
    | Proof
    | LauncherInfo
    | LauncherSignalled
)
TO_LAUNCHER: tuple[type, ...] = (
    m.Prepare,
    m.Stop,
    m.WaitForLeftovers,
    m.ForwardSignal,
    m.Pause,
    m.CollectStacks,
    m.Reach,
    m.Ping,
    Challenge,
    Rejected,
    Welcome,
    SurveyNode,
    StartWorkers,
    ExitLauncher,
    Notice,
)
FROM_LAUNCHER: tuple[type, ...] = (
    m.Prepared,
    m.Started,
    WorkerExit,
    m.Alive,
    m.Stacks,
    m.AgentNotice,
    m.PreloadEnded,
    m.LeftoversRunning,
    m.AttemptEnded,
    m.AgentFailed,
    m.Surveyed,
    m.Reached,
    m.Pong,
    m.AgentEnding,
    Call,
    Proof,
    LauncherInfo,
    LauncherSignalled,
)
