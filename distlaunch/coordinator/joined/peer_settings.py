"""What a launcher that has joined a job goes by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.record import Record
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol import remote as r
from distlaunch.transport.connection import Link

END_S = 10.0
"""How long workers may take to end beyond their grace."""
SIGNALS_LEAVE = 4
"""The first that ends a job has all asked, the next has all killed; after so many a launcher leaves alone, whatever
the coordinator does."""
AGAIN_S = 0.5
"""So long after it was joined a coordinator that is lost is called again, and no sooner."""


class Planner(Protocol):
    """What this launcher plans of its own; see ``resolve.joining``."""

    def survey(self, serial: int) -> r.Survey:
        """Make the question about its own node."""

    def apply(self, *, clock: float, wall: float, attempt: int, restarts: int) -> p.Apply:
        """Say what it is to do."""

    def renamed(self, job_id: str) -> None:
        """Take note of what the job is called from now on."""

    def commenced(self, told: p.Commence, interfaces: list[str]) -> LaunchPlan:
        """Plan its own workers of an attempt. Raises LaunchError; ProtocolError for a start that makes no sense."""


class PeerSettings(Record):
    """What does not change."""

    coordinator: str
    """What it is called: ``node 0 at n1:29400``."""
    job_id: str
    """What it calls the job."""
    max_restarts: int
    failure_grace_s: float
    lost_after_s: float
    """How long the coordinator may be silent, until it says otherwise itself."""
    flexible: bool
    """The job goes on without a node that is lost, and takes it in again."""
    leaves: bool = False
    """TERM at this launcher ends its own part alone: its node is drained. A scheduler that tells all means the job."""
    grace_s: float = 25.0
    """How long workers have then."""
    speaks: bool = True
    """The user hears from us what the coordinator says."""


Call = Callable[[], tuple[Link, p.Welcome]]
"""Call the coordinator (again), and wait until it lets us in. Raises LaunchError, and Stopped."""
