"""The events that the job policy handles and the actions that it returns. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Literal

from distlaunch.coordinator.policy.restarts import Final, RestartDecision
from distlaunch.core.errors import LaunchError
from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.record import Record
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol.agent_messages import Surveyed
from distlaunch.diagnosis.model import Diagnosis

if TYPE_CHECKING:
    from distlaunch.diagnosis.hang import HangDiagnosis
    from distlaunch.planning.master_address import Meeting
    from distlaunch.transport.connect_errors import ConnectFailure


class Composition(Record):
    """The nodes of an attempt and the plan for them, complete but for port, meeting point and
    attempt."""

    members: tuple[int, ...]
    """By node rank: the node's number in the policy's list of hosts, which never changes."""
    plan: LaunchPlan
    places: tuple[tuple[str, int], ...] | None = None
    """By member's place: its host and lowest rank, where members are not the plan's nodes."""


Compose = Callable[[Mapping[int, Surveyed]], Composition]
"""Plans for the nodes that were surveyed (all that may take part, spares as well; it takes what the
bounds allow).

Raises ConfigError for what can never work, and ``NodesDiffer`` for what may look otherwise in a
moment.
"""


# --- events


class Begin(Record):
    """Start the job."""


class FromNode(Record):
    """A message came from the agent of a node."""

    node: int
    message: m.FromAgent | m.Surveyed | m.Reached


class Signalled(Record):
    """The launcher got a signal, or the user typed one into the worker's terminal (``kill``: more
    than once)."""

    signum: int
    kill: bool = False
    node: int | None = None
    """Whose launcher, or agent, got it; None: this one."""
    spawner: bool = False
    """The workers' parent on that node got it."""
    reached: bool = False
    """The workers of that node have got it as well: Slurm sends it to all processes of a step,
    under linuxproc."""
    came: float | None = None
    """When it came, on the job's clock, if it was held back; None: just now."""

    @property
    def sender(self) -> tuple[int | None, bool]:
        """Return the process that reported the signal: its node (None: this launcher) and whether
        it is a spawner."""
        return self.node, self.spawner


class Tick(Record):
    """The deadline has come."""


class Joined(Record):
    """The agent of a node that ``Connect`` named has said ``Hello``."""

    node: int
    host: str | None = None
    """What it is called, where that was not known before it came."""


class LoggedIn(Record):
    """The way to a node stands, and its agent is being started."""

    node: int


class Unreachable(Record):
    """``Connect`` has failed."""

    node: int
    failure: ConnectFailure


class LossKind(Enum):
    """How a node that had joined was lost: hints go by it."""

    GONE = "its connection has ended"
    SILENT = "it did not answer"
    UNHEARD = "it heard nothing of the launcher"
    ODD = "it sent what no node of ours sends"
    RAY_DRIVER = "Ray's driver has ended"
    RAY_ACTOR = "Ray has lost the actor of the agent"


class Lost(Record):
    """A node that had joined is gone: its channel has closed, or it has been silent for too
    long."""

    node: int
    why: str
    """As a clause: ``the connection was closed``."""
    final: bool = False
    """With it went what led to all nodes: none can be reached any more."""
    kind: LossKind = LossKind.GONE


class Discovered(Record):
    """The command of --discover has been run again. Names of hosts, as the source writes them, or
    why it failed."""

    hosts: tuple[str, ...] | None
    problem: str | None = None


class Known(Record):
    """A launcher that had another coordinator knows of attempts: we go on from there. Nothing has
    been started yet."""

    attempt: int
    restarts: int


class Refused(Record):
    """There can be no attempt: launchers have been told different things, or workers cannot be told
    all."""

    text: str
    hint: str | None = None


class Noted(Record):
    """Whoever starts the agents has said something that the user should hear."""

    text: str
    warning: bool = True


class Broken(Record):
    """The launcher itself can no longer do its work."""

    text: str
    without: int | None = None
    """A member of which nothing can come any more, if the fault has cost one."""


Event = (
    Begin
    | FromNode
    | Signalled
    | Tick
    | LoggedIn
    | Joined
    | Unreachable
    | Lost
    | Discovered
    | Known
    | Refused
    | Noted
    | Broken
)


# --- actions


class Connect(Record):
    """Reach a node (anew); answered by ``Joined`` or ``Unreachable``. What it was connected by
    before is closed."""

    node: int
    delay_s: float = 0.0


class Disconnect(Record):
    """Leave a node; nothing comes from it any more."""

    node: int


class Discover(Record):
    """Run the command of --discover again; answered by ``Discovered``."""


class ToNode(Record):
    """Send a message to the agent of a node."""

    node: int
    message: m.ToAgent | m.Survey | m.Reach


class StartAttempt(Record):
    """Bind the plan for an attempt and start its workers on all nodes; ``port`` is held on the
    master's node."""

    attempt: int
    port: int | None
    composition: Composition | None = None
    """Which nodes take part; None on one machine."""
    meeting: Meeting | None = None
    """Where they meet; None where there is one node."""
    ports: tuple[int, ...] = ()
    """Held for the workers: as many for each, by rank."""


class Say(Record):
    """Tell the user."""

    text: str
    level: Literal["info", "warning"] = "info"


class JobError(Record):
    """Report why the job ends, or cannot start, although no worker has failed."""

    exit_code: int
    message: str
    """One sentence, without a prefix."""
    table: str = ""
    """Lines below the message: the nodes, each with its reason."""
    hints: tuple[str, ...] = ()
    prefix: str = "error: "

    @staticmethod
    def of(error: LaunchError) -> JobError:
        """Return the report of an error in a job that has begun."""
        hints = () if error.hint is None else (error.hint,)
        return JobError(exit_code=error.exit_code, message=error.message, hints=hints)

    @property
    def text(self) -> str:
        """Return the lines for the user."""
        lines = [f"{self.prefix}{self.message}", self.table.rstrip()]
        return "\n".join(filter(None, (*lines, *(f"  hint: {hint}" for hint in self.hints))))


class Entry(Record):
    """Add an event to the job's record."""

    type: str
    fields: Mapping[str, object]


class Failed(Record):
    """An attempt failed."""

    diagnosis: Diagnosis
    attempt: int
    decision: RestartDecision
    restarts: int = 0
    """How many there have been before; attempts may be more, where nodes were replaced."""
    while_stopping: bool = False
    """Workers failed after the job was told to stop; the exit code is that of the stop."""

    @property
    def final(self) -> bool:
        """Return whether the job ends with this attempt."""
        return isinstance(self.decision, Final)


class Hung(Record):
    """An attempt hung and was ended."""

    diagnosis: HangDiagnosis
    killed: tuple[int, ...]
    """Ranks that did not end when they were told to stop."""
    after_grace: str | None
    """Why they were killed then; None: the user wanted it."""
    leftovers: str | None
    """Which processes that workers had left were killed; None if there were none."""
    attempt: int
    decision: RestartDecision
    restarts: int = 0
    """As in ``Failed``."""

    @property
    def final(self) -> bool:
        """Return whether the job ends with this attempt."""
        return isinstance(self.decision, Final)


class KeepStacks(Record):
    """File where the workers stood."""

    attempt: int
    stacks: tuple[m.Stack, ...]


class Suspend(Record):
    """The worker stopped from its terminal (Ctrl-Z): stop the launcher as well."""


class End(Record):
    """The job is over."""

    exit_code: int


Action = (
    Connect
    | Disconnect
    | Discover
    | ToNode
    | StartAttempt
    | Say
    | JobError
    | Entry
    | Failed
    | Hung
    | KeepStacks
    | Suspend
    | End
)
