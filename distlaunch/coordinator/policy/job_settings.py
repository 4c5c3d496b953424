"""The settings of the job policy, which do not change during a job. Data only."""

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
    """How the nodes of a job are set up, if the job uses other machines as well.

    Its functions do no I/O.
    """

    hosts: tuple[str, ...]
    """By member number: first the nodes that train, then spares."""
    bounds: tuple[int, int]
    """The fewest and the most nodes that train; equal for a job of fixed size."""
    survey: Callable[[int], Survey]
    """Returns the survey of a node, by its serial."""
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
    """Returns the word that the master port sends in an attempt, to be recognized."""
    join_timeout_s: float = 60.0
    patience_s: float | None = None
    """How long failed nodes are tried again at the first start of a job of fixed size; None: until
    the join timeout."""
    discover: bool = False
    """The command of --discover lists the hosts, which may change."""
    launchers: bool = False
    """Each node has a launcher of its own, which connects to this one."""
    named_once: bool = False
    """The user named the hosts: no two of them may be the same machine."""
    alone: str | None = None
    """A hint how to run on this machine alone, if a scheduler's environment named the nodes."""
    may_have_bounds: bool = True
    """Hints may advise a number of nodes MIN:MAX."""

    @property
    def flexible(self) -> bool:
        """Return whether the nodes of the job may change."""
        return self.bounds[0] < self.bounds[1] or len(self.hosts) > self.bounds[1] or self.discover


class Scheduler(Record):
    """The actions that the job's scheduler takes by itself. Times are seconds."""

    kill_after_s: float = 30.0
    """After TERM."""
    signals_all: bool = False
    """Its signals go to all processes of a node, not to the agent alone."""
    attempt: int = 0
    """How often it has started the job again. The first attempt gets this number."""


class PolicySettings(Record):
    """Settings that do not change during a job. Times are seconds."""

    hosts: tuple[str, ...] = ()
    """By node rank. This and the next two are not used with ``gathering``."""
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
    """The folder of the script, to tell the user's code from libraries in stacks."""
    master_port: int = 0
    worker_ports: int = 0
    """How many ports a node holds for each of its workers."""
    meets_at_port: bool = False
    """Workers that train together always use ``master_port``."""
    max_restarts: int = 0
    restart_window_s: float | None = None
    restart_delay_s: tuple[float, float] = (0.0, 0.0)
    """The delay before the first restart in a row, and the longest. It doubles with each."""
    min_uptime_s: float = 10.0
    grace_s: float = 25.0
    failure_grace_s: float = 5.0
    linger_s: float = 5.0
    """How long processes that workers have left may run on after the last worker has ended with
    0."""
    hang_timeout_s: float | None = None
    """End an attempt whose workers show no sign of life for so long; None: never."""
    hang_notice_s: float | None = None
    """Without ``hang_timeout_s``: after so long a silence the user gets one notice where the workers
    of a job of several stand."""
    terminal: bool = False
    """The one worker has a pseudo-terminal: Ctrl-C reaches it directly, and shows in its exit."""
    dialect: Dialect = Dialect()
    """The names of options, for hints."""
    repeated_term_kills: bool = True
    """A second TERM kills the workers. False under a scheduler, which repeats TERM."""
