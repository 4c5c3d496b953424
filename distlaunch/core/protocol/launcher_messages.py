"""Messages between the launchers of one job over TCP. There is one launcher per node or per worker.

A launcher never executes a command that another launcher sends: its own command line decides what
runs. Messages contain numbers, addresses, host names, and text for users.

The connection begins with the handshake (``handshake``). After ``Welcome``, the messages are those
of ``agent_messages`` except those with commands: ``SurveyNode`` replaces ``Survey``, and
``StartWorkers`` replaces ``Start``.
"""

from __future__ import annotations

from distlaunch.core.errors import ProtocolError
from distlaunch.core.model.record import Record
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m

PROTOCOL_VERSION = 3
MOST_ATTEMPTS = 1 << 20
"""Largest number of attempts. At one attempt per second this takes twelve days."""


def is_possible_last_attempt(attempt: int, restarts: int) -> bool:
    """Return whether a launcher's report of its last attempt and its number of restarts is
    plausible.

    ``attempt`` is the number of the last attempt, -1 if there was none. It must be below
    MOST_ATTEMPTS, and ``restarts`` cannot exceed ``attempt``.
    """
    return -1 <= attempt < MOST_ATTEMPTS and 0 <= restarts <= max(0, attempt)


def is_possible_attempt(attempt: int, restarts: int = 0) -> bool:
    """Return whether the numbers are possible for an attempt that a coordinator starts."""
    return attempt >= 0 and is_possible_last_attempt(attempt - 1, 0) and 0 <= restarts <= attempt


class Call(Record):
    """Request of a launcher, or of an agent started by srun, to join the job."""

    version: int
    release: str
    """Release of distlaunch, such as 0.1.0. All launchers of a job must have the same."""
    job_key: str
    """The scheduler's job id or --job-id; may be empty. All launchers of a job must have the same.
    """
    rank: int | None
    """The launcher's node rank; if each worker has a launcher, the worker's rank. None: the
    coordinator assigns a rank."""
    host: str
    instance: str
    """Random id of this launcher, by which the coordinator recognises a launcher that
    reconnects."""
    nonce: str
    """Random value in hexadecimal, on which the listener's proof is computed."""
    scrypt: bool = True
    """The caller's Python has ``hashlib.scrypt``."""


class Challenge(Record):
    """The listener's answer to ``Call``: the method by which the caller must prove that it knows
    the secret."""

    nonce: str
    key_method: str
    """How the key of both proofs is made: a constant of ``token_keys``."""
    salt: str
    """Hexadecimal salt, or a credential of munge; empty if the method needs none."""


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
    """The launcher's node rank (with a launcher per worker: its rank)."""
    folder: str = ""
    """Name of the run directory if it differs from the job's id."""
    proof: str = ""
    """HMAC-SHA256(key, "listener" nonce-of-the-call nonce-of-the-challenge), hexadecimal; empty
    without a secret.
    """


class LauncherInfo(Record):
    """Settings of a launcher, sent right after ``Welcome``. The coordinator checks that the
    settings of all launchers agree."""

    num_nodes: tuple[int, ...]
    """Smallest and largest number of nodes."""
    slots: int | None
    """Number of workers; None if the launcher's devices decide."""
    command: str
    """SHA-256 of the workers' argv without paths of interpreters, for comparison."""
    backend: str
    choices: str
    """SHA-256 of the backend options that the user has set, for comparison."""
    clock: float
    """The launcher's time in seconds. ``Pong`` and ``WorkerExit`` use this clock."""
    wall: float
    """Seconds since the epoch, to find clocks that are far off."""
    attempt: int
    """The highest attempt that the launcher knows; -1: none. A coordinator that was restarted
    continues from there."""
    restarts: int

    def __post_init__(self) -> None:
        """Raise ProtocolError for impossible numbers. A new coordinator would continue from these
        numbers."""
        if len(self.num_nodes) != 2 or not is_possible_last_attempt(self.attempt, self.restarts):
            raise ProtocolError("it reports impossible numbers of nodes, attempts or restarts")


class SurveyNode(Record):
    """Like ``Survey``, but the launcher's own command line determines directory, programs and
    script."""

    serial: int


class StartWorkers(Record):
    """Start the launcher's workers of this attempt."""

    attempt: int
    restarts: int
    node_rank: int
    local_ranks: tuple[int, ...]
    """The workers of the node that this launcher runs: all of them, or one if each worker has a
    launcher."""
    hosts: tuple[str, ...]
    """Hosts by node rank."""
    slots: tuple[int, ...]
    """Numbers of workers by node rank."""
    master_addr: str
    master_port: int
    interface: str
    """Interface to the other nodes (GLOO_SOCKET_IFNAME); empty if the variable need not be set."""
    nccl_interface: str = ""
    """The interface for NCCL_SOCKET_IFNAME."""
    cluster: tuple[str, ...] = ()
    """``HOST:PORT`` by rank, the same number for each rank, if the backend's workers need each
    other's ports."""


class LauncherSignalled(Record):
    """The launcher has received a signal."""

    signum: int


class ExitLauncher(Record):
    """The job has ended. Exit with this code; ``text`` is printed at the end for the user."""

    exit_code: int
    text: str
    summary: str = ""
    """Why the job has failed, in one sentence, for the error file; empty if it has not failed."""
    is_error: bool = False
    """Whether ``text`` reports an error. Otherwise it is the last line of a job that was
    stopped."""


class Notice(Record):
    """A line for the user, printed on every node."""

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
