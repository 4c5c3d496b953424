"""What the policy goes by, fixed for a whole job. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from distlaunch.core.model.record import Record
from distlaunch.planning.train_options import Dialect

if TYPE_CHECKING:
    from distlaunch.coordinator.policy.events_and_actions import Compose
    from distlaunch.core.protocol.agent_messages import Reached, Survey, Surveyed
    from distlaunch.planning.master_address import Meeting


class Gathering(Record):
    """How the nodes of a job come together, where they are more than this launcher. All functions
    are pure."""

    hosts: tuple[str, ...]
    """By member number: those that are to train first, then spares."""
    bounds: tuple[int, int]
    """The fewest and the most nodes that train; equal for a job of fixed size."""
    survey: Callable[[int], Survey]
    """Gives the question to a node, by its serial."""
    compose: Compose
    addresses: Callable[[Surveyed, str], tuple[str, ...]]
    """Gives where the master may be reached, from its survey and its host as the list of hosts has
    it: best first.

    Raises LaunchError.
    """
    meet: Callable[[Sequence[Surveyed], Mapping[int, Reached]], Meeting]
    """Settles the meeting point from all members' surveys, by node rank, and what each but the
    first has reached.

    Raises LaunchError.
    """
    token: Callable[[int], str]
    """Gives the word by which the master's port is known in an attempt."""
    join_timeout_s: float = 60.0
    patience_s: float | None = None
    """At the first start of a job of fixed size, a node that fails is tried again for so long only;
    None: as ever."""
    discover: bool = False
    """Hosts may come and go: the command of --discover tells."""
    launchers: bool = False
    """Each node has a launcher of its own, which calls."""
    named_once: bool = False
    """The user named the hosts: none may be a machine that another is, under another name."""
    alone: str | None = None
    """How to run on this machine alone, as a hint, if it is a scheduler's environment that named
    the nodes."""
    may_have_bounds: bool = True
    """The number of nodes may be MIN:MAX, if the user wants it so: hints advise it."""

    @property
    def flexible(self) -> bool:
        """Return whether the job may go on with other nodes than it began with."""
        return self.bounds[0] < self.bounds[1] or len(self.hosts) > self.bounds[1] or self.discover


class Scheduler(Record):
    """What the scheduler whose job this is does on its own. Times are seconds."""

    kill_after_s: float = 30.0
    """After TERM."""
    signals_all: bool = False
    """Its signals go to all processes of the nodes' agents, workers too, not to the agents
    alone."""
    attempt: int = 0
    """How often it has begun the job anew: the number of our first attempt."""


class PolicySettings(Record):
    """What does not change during a job. Times are seconds."""

    hosts: tuple[str, ...] = ()
    """By node rank; not used with ``gathering``, as are the next two."""
    first_ranks: tuple[int, ...] = ()
    """The lowest rank of each node, by node rank."""
    world_size: int = 0
    scheduler: Scheduler | None = None
    gathering: Gathering | None = None
    """For a job of several nodes, or of one that is not this machine."""
    python: str | None = None
    """The workers' interpreter, for hints; None if they are no Python."""
    adds_local_rank: bool = False
    """The script gets ``--local_rank=N`` from the launcher, also for hints."""
    dashes_first: bool = False
    """The first argument of the script is ``--``, for hints."""
    script_dir: str = ""
    """Where the script is: tells the user's code from libraries in stacks."""
    master_port: int = 0
    worker_ports: int = 0
    """How many ports its node holds for each worker."""
    meets_at_port: bool = False
    """Workers that train together always use ``master_port``."""
    max_restarts: int = 0
    restart_window_s: float | None = None
    restart_delay_s: tuple[float, float] = (0.0, 0.0)
    """How long to wait before the first restart in a row, and at most: it doubles with each."""
    min_uptime_s: float = 10.0
    grace_s: float = 25.0
    failure_grace_s: float = 5.0
    linger_s: float = 5.0
    """How long processes that workers have left may run on after the last worker has ended with
    0."""
    hang_timeout_s: float | None = None
    """End an attempt whose workers show no sign of life for so long; None: never."""
    hang_notice_s: float | None = None
    """Without ``hang_timeout_s``: say once where the workers of a job of several stand that are
    silent for so long."""
    terminal: bool = False
    """The one worker has a pseudo-terminal: Ctrl-C reaches it without us, and shows in how it
    ends."""
    dialect: Dialect = Dialect()
    """What options are called, for hints."""
    repeated_term_kills: bool = True
    """False under a scheduler, which sends TERM again and again."""
