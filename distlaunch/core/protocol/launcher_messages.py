"""Messages between the launchers of one job over TCP, one launcher per node or per worker.

A launcher never executes a command that another launcher sends: its own command line decides what
runs. Messages contain numbers, addresses, host names, and text for users.

After the handshake, the messages are those of ``agent_messages`` except those with commands:
``SurveyNode`` replaces ``Survey``, and ``StartWorkers`` replaces ``Start``.
"""

from __future__ import annotations

from distlaunch.core.errors import ProtocolError
from distlaunch.core.model.record import Record
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m

PROTOCOL_VERSION = 4
MOST_ATTEMPTS = 1 << 20
"""Largest number of attempts: twelve days of one attempt per second."""


def is_possible_last_attempt(attempt: int, restarts: int) -> bool:
    """Return whether a launcher's last attempt (-1: none) and its number of restarts are plausible.

    ``attempt`` must be below MOST_ATTEMPTS, and ``restarts`` cannot exceed it.
    """
    return -1 <= attempt < MOST_ATTEMPTS and 0 <= restarts <= max(0, attempt)


def is_possible_attempt(attempt: int, restarts: int = 0) -> bool:
    """Return whether the numbers are possible for an attempt that a coordinator starts."""
    return attempt >= 0 and is_possible_last_attempt(attempt - 1, 0) and 0 <= restarts <= attempt


class Call(Record):
    """Request of a launcher, or of an agent started by srun, to join the job."""

    version: int
    release: str
    """Release of distlaunch, such as 0.1.0, the same in all launchers."""
    job_key: str
    """The scheduler's job id or --job-id, the same in all launchers; may be empty."""
    rank: int | None
    """The node rank, or the worker's rank with a launcher per worker. None: the coordinator assigns
    one."""
    host: str
    instance: str
    """Random id by which the coordinator recognises a launcher that reconnects."""
    nonce: str
    """Random hexadecimal value for the listener's proof."""
    scrypt: bool = True
    """The caller's Python has ``hashlib.scrypt``."""


class Challenge(Record):
    """The listener's answer to ``Call``: the method by which the caller must prove that it knows
    the secret."""

    nonce: str
    key_method: str
    """How the key of both proofs is made: a constant of ``token_keys``."""
    salt: str
    """Hexadecimal salt, or a credential of munge; may be empty."""


class Proof(Record):
    """The caller's answer to ``Challenge``."""

    proof: str


class Rejected(Record):
    """The caller cannot join. ``again``: another try soon may succeed."""

    text: str
    hint: str | None
    exit_code: int
    again: bool
    proof: str = ""
    """As in ``Welcome``; empty if the caller has not proved itself."""


class Welcome(Record):
    """The caller has joined the job."""

    job_id: str
    rank: int
    """The node rank, or the rank with a launcher per worker."""
    folder: str = ""
    """Name of the run directory if it is not the job's id."""
    proof: str = ""
    """HMAC-SHA256(key, "listener" nonce-of-the-call nonce-of-the-challenge), hexadecimal; empty
    without a secret."""


class LauncherInfo(Record):
    """Settings of a launcher, sent right after ``Welcome``. The coordinator checks that all
    launchers have the same settings."""

    num_nodes: tuple[int, ...]
    """Smallest and largest number of nodes."""
    slots: int | None
    """Number of workers; None if the devices decide."""
    command: str
    """SHA-256 of the workers' argv without paths of interpreters, for comparison."""
    backend: str
    choices: str
    """SHA-256 of the user's backend options, for comparison."""
    clock: float
    """The launcher's time in seconds, also used by ``Pong`` and ``WorkerExit``."""
    wall: float
    """Seconds since the epoch, to find clocks that are far off."""
    attempt: int
    """The highest attempt that the launcher knows; -1: none. A restarted coordinator continues from
    there."""
    restarts: int

    def __post_init__(self) -> None:
        """Raise ProtocolError for impossible numbers, from which a new coordinator would
        continue."""
        if len(self.num_nodes) != 2 or not is_possible_last_attempt(self.attempt, self.restarts):
            raise ProtocolError("it reports impossible numbers of nodes, attempts or restarts")


class SurveyNode(Record):
    """Like ``Survey``, but the launcher's own command line has directory, programs and script."""

    serial: int


class StartWorkers(Record):
    """Start the launcher's workers of this attempt."""

    attempt: int
    restarts: int
    node_rank: int
    local_ranks: tuple[int, ...]
    """The workers that this launcher runs: all of the node, or one with a launcher per worker."""
    hosts: tuple[str, ...]
    """Hosts by node rank."""
    slots: tuple[int, ...]
    """Numbers of workers by node rank."""
    master_addr: str
    master_port: int
    interface: str
    """Interface to the other nodes (GLOO_SOCKET_IFNAME), if it must be set."""
    nccl_interface: str = ""
    """The interface for NCCL_SOCKET_IFNAME."""
    cluster: tuple[str, ...] = ()
    """``HOST:PORT`` by rank, equally many for each, if workers need each other's ports."""


class LauncherSignalled(Record):
    """The launcher has received a signal."""

    signum: int


class ExitLauncher(Record):
    """The job has ended. Exit with this code; ``text`` is printed for the user."""

    exit_code: int
    text: str
    summary: str = ""
    """Why the job has failed, in one sentence, for the error file."""
    is_error: bool = False
    """Whether ``text`` is an error. Otherwise it is the last line of a stopped job."""


class Notice(Record):
    """A line for the user, which every launcher prints."""

    text: str
    level: str


ToLauncher = (
    m.Prepare
    | m.Stop
    | m.WaitForLeftovers
    | m.ForwardSignal
    | m.Pause
    | m.CollectStacks
    | m.ReadUsage
    | m.ListLogs
    | m.ReadLog
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
    | m.Usage
    | m.LogList
    | m.LogPart
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
    m.ReadUsage,
    m.ListLogs,
    m.ReadLog,
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
    m.Usage,
    m.LogList,
    m.LogPart,
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
