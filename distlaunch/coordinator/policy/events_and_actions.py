"""The events that the job policy handles and the actions that it returns. Data only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Literal

from distlaunch.coordinator.policy.advisory import AdvisoryFault
from distlaunch.coordinator.policy.restarts import Final, RestartDecision
from distlaunch.core.errors import LaunchError
from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.record import Record
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol.agent_messages import Surveyed
from distlaunch.diagnosis.model import Diagnosis

if TYPE_CHECKING:
    from distlaunch.diagnosis.hang import HangDiagnosis
    from distlaunch.planning.master_address import MasterChoice
    from distlaunch.transport.connect_errors import ConnectFailure


class AttemptPlan(Record):
    """The nodes of an attempt and their plan, without port, master address and number of the
    attempt."""

    node_numbers: tuple[int, ...]
    """Node numbers by node rank. A node number is an index in the policy's list of hosts and never
    changes."""
    plan: LaunchPlan
    places: tuple[tuple[str, int], ...] | None = None
    """Their hosts and lowest ranks, by node rank, if they are not the nodes of the plan."""


PlanAttempt = Callable[[Mapping[int, Surveyed]], AttemptPlan]
"""Returns the plan for the surveyed nodes. It uses as many as the bounds allow; the others are
spares.

Raises ConfigError if no plan will ever be possible, and ``NodesDifferError`` if a later survey may
make one possible.
"""


# --- events


class Begin(Record):
    """Start the job."""


class FromNode(Record):
    """The agent of a node has sent a message."""

    node: int
    message: m.FromAgent | m.Surveyed | m.Reached


class Signalled(Record):
    """A launcher, an agent or a spawner has received a signal, or the user has typed Ctrl-C.

    ``kill``: the user has typed Ctrl-C repeatedly in the worker's terminal.
    """

    signum: int
    kill: bool = False
    node: int | None = None
    """The node whose launcher or agent received the signal; None for this launcher."""
    spawner: bool = False
    """The spawner on that node received the signal."""
    reached: bool = False
    """Whether the workers of that node have received it as well. With the plugin linuxproc, Slurm
    signals all processes of a step."""
    came: float | None = None
    """When a held back signal was received, on the job's clock. None: just now."""

    @property
    def sender(self) -> tuple[int | None, bool]:
        """The process that reported the signal: its node (None: this launcher) and whether it is a
        spawner."""
        return self.node, self.spawner


class Tick(Record):
    """The deadline of the policy has passed."""


class Joined(Record):
    """The agent of a node, after ``Connect``, has sent ``Hello``."""

    node: int
    host: str | None = None
    """The node's host, if it was unknown."""


class LoggedIn(Record):
    """The login on a node has succeeded, and its agent is being started."""

    node: int


class Unreachable(Record):
    """The action ``Connect`` has failed for this node."""

    node: int
    failure: ConnectFailure


class LossKind(Enum):
    """How a connected node was lost. It decides the hint."""

    GONE = "its connection has ended"
    SILENT = "it did not answer"
    UNHEARD = "it heard nothing of the launcher"
    ODD = "it sent what no node of ours sends"
    RAY_DRIVER = "Ray's driver has ended"
    RAY_ACTOR = "Ray has lost the actor of the agent"


class Lost(Record):
    """The connection of a node has ended, or it was silent for too long."""

    node: int
    why: str
    """The reason as a clause: ``the connection was closed``."""
    final: bool = False
    """Whether no node can be reached any longer."""
    kind: LossKind = LossKind.GONE


class Discovered(Record):
    """The result of running the --discover command again: the printed hosts, or the reason of a
    failure."""

    hosts: tuple[str, ...] | None
    problem: str | None = None


class AttemptsKnown(Record):
    """A joined launcher knows attempts of a lost coordinator, from whose numbers the job continues.

    Sent before anything has been started.
    """

    attempt: int
    restarts: int


class JobRefused(Record):
    """No attempt is possible: the launchers disagree, or the workers cannot get all addresses."""

    text: str
    hint: str | None = None


class LinePrinted(Record):
    """The program that starts the agents has printed a line for the user."""

    text: str
    warning: bool = True


class LauncherFailed(Record):
    """The launcher cannot continue because of an internal error."""

    text: str
    without: int | None = None
    """The node that the error has cut off."""


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
    | AttemptsKnown
    | JobRefused
    | LinePrinted
    | LauncherFailed
)


# --- actions


class Connect(Record):
    """Connect to a node, and close an earlier connection. Answered by ``Joined`` or
    ``Unreachable``."""

    node: int
    delay_s: float = 0.0


class Disconnect(Record):
    """Disconnect a node. No further event of it follows."""

    node: int


class Discover(Record):
    """Run the command of --discover again; answered by ``Discovered``."""


class SendToNode(Record):
    """Send a message to the agent of a node."""

    node: int
    message: m.ToAgent | m.Survey | m.Reach


class StartAttempt(Record):
    """Complete the plan for an attempt and start its workers on all nodes.

    ``port`` is reserved on the master's node.
    """

    attempt: int
    port: int | None
    attempt_plan: AttemptPlan | None = None
    """The nodes and their plan; None for a job on one machine."""
    master: MasterChoice | None = None
    """The master address; None if the job has one node."""
    ports: tuple[int, ...] = ()
    """The ports for workers, by rank, equally many for each."""


class ShowMessage(Record):
    """Show a message to the user."""

    text: str
    level: Literal["info", "warning"] = "info"


class JobError(Record):
    """Why the job ends or cannot start, although no worker has failed."""

    exit_code: int
    message: str
    """One sentence, without a prefix."""
    table: str = ""
    """Lines below the message: the nodes, each with its reason."""
    hints: tuple[str, ...] = ()
    prefix: str = "error: "

    @staticmethod
    def of(error: LaunchError) -> JobError:
        """Return the JobError for an error of a job that has begun."""
        hints = () if error.hint is None else (error.hint,)
        return JobError(exit_code=error.exit_code, message=error.message, hints=hints)

    @property
    def text(self) -> str:
        """The lines for the user."""
        lines = [f"{self.prefix}{self.message}", self.table.rstrip()]
        return "\n".join(filter(None, (*lines, *(f"  hint: {hint}" for hint in self.hints))))


class RecordEvent(Record):
    """Add an event to the job's record."""

    type: str
    fields: Mapping[str, object]


class ReportFailure(Record):
    """An attempt failed."""

    diagnosis: Diagnosis
    attempt: int
    decision: RestartDecision
    restarts: int = 0
    """The number of restarts before, without attempts after lost nodes."""
    while_stopping: bool = False
    """Whether workers failed after a request to stop. The exit code is then that of the stop."""

    @property
    def final(self) -> bool:
        """Whether the job ends with this attempt."""
        return isinstance(self.decision, Final)


class ReportHang(Record):
    """An attempt hung and was ended."""

    diagnosis: HangDiagnosis
    killed: tuple[int, ...]
    """Ranks that did not end when they were asked to."""
    after_grace: str | None
    """Why they were killed. None: because of the user's signal."""
    leftovers: str | None
    """A text about the leftover processes that were killed, if any."""
    dead_threads: tuple[str, ...]
    """Lines on threads and child processes of workers that an exception had ended."""
    written: tuple[str, ...] = ()
    """Lines of workers about their wait."""
    attempt: int
    decision: RestartDecision
    restarts: int = 0
    """As in ``ReportFailure``."""

    @property
    def final(self) -> bool:
        """Whether the job ends with this attempt."""
        return isinstance(self.decision, Final)


class WriteStacks(Record):
    """Write the workers' stacks to files."""

    attempt: int
    stacks: tuple[m.Stack, ...]


class Suspend(Record):
    """The worker was suspended from its terminal (Ctrl-Z). Suspend the launcher as well."""


class EndJob(Record):
    """The job has ended."""

    exit_code: int


Action = (
    Connect
    | Disconnect
    | Discover
    | SendToNode
    | StartAttempt
    | ShowMessage
    | JobError
    | RecordEvent
    | ReportFailure
    | ReportHang
    | WriteStacks
    | Suspend
    | EndJob
    | AdvisoryFault
)
