"""The settings of the job policy, which do not change during a job. Data only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from distlaunch.core.model.record import Record

if TYPE_CHECKING:
    from distlaunch.coordinator.policy.events_and_actions import PlanAttempt
    from distlaunch.core.protocol.agent_messages import Reached, Survey, Surveyed
    from distlaunch.planning.master_address import MasterChoice
    from distlaunch.planning.train_options import HangAction


class NodeSetupSettings(Record):
    """How the nodes of a job are set up, if it uses other machines. Its functions do no I/O."""

    hosts: tuple[str, ...]
    """Hosts by node number: first the training nodes, then the spare nodes."""
    bounds: tuple[int, int]
    """The smallest and the largest number of training nodes."""
    survey: Callable[[int], Survey]
    """Returns the survey of a node with this serial number."""
    plan_attempt: PlanAttempt
    addresses: Callable[[Surveyed, str], tuple[str, ...]]
    """Returns the addresses of the master, best first, from its survey and its name in the list of
    hosts. Raises LaunchError if it has no usable address."""
    choose_master: Callable[[Sequence[Surveyed], Mapping[int, Reached]], MasterChoice]
    """Returns the master address from the surveys of all nodes, by node rank, and the addresses
    that the other nodes have reached. Raises LaunchError if none was reached by all."""
    token: Callable[[int], str]
    """Returns the token of rank 0's node on the master port in an attempt."""
    join_timeout_s: float = 60.0
    retry_timeout_s: float | None = None
    """How long failed connections are retried at the first start of a job of fixed size. None:
    until the join timeout."""
    discover: bool = False
    """The --discover command lists the hosts, which may change."""
    launchers: bool = False
    """Whether each node has its own launcher, which connects to this one."""
    named_once: bool = False
    """Whether the user named the hosts, so that two names must not mean the same machine."""
    alone: str | None = None
    """A hint how to run on this machine only, if a scheduler named the nodes."""
    may_have_bounds: bool = True
    """Hints may suggest a number of nodes MIN:MAX."""

    @property
    def flexible(self) -> bool:
        """Whether the nodes of the job may change."""
        return self.bounds[0] < self.bounds[1] or len(self.hosts) > self.bounds[1] or self.discover


class Scheduler(Record):
    """Settings of the scheduler under which the job runs. Times are seconds."""

    kill_after_s: float = 30.0
    """Seconds from the scheduler's TERM to its KILL."""
    signals_all: bool = False
    """The scheduler signals all processes of a node, not only the agent."""
    attempt: int = 0
    """How often the scheduler has started the job again: the number of the first attempt."""


class PolicySettings(Record):
    """Settings that do not change during a job. Times are seconds."""

    hosts: tuple[str, ...] = ()
    """Hosts by node rank. Not used with ``node_setup``, like the next two fields."""
    first_ranks: tuple[int, ...] = ()
    """The lowest rank of each node, by node rank."""
    world_size: int = 0
    scheduler: Scheduler | None = None
    node_setup: NodeSetupSettings | None = None
    """For a job on several nodes or on another machine."""
    python: str | None = None
    """The workers' interpreter, for hints, if workers run Python."""
    adds_local_rank: bool = False
    """Whether the launcher passes ``--local_rank=N`` to the script. Used for hints."""
    dashes_first: bool = False
    """The first argument of the script is ``--``. Used for hints."""
    script_dir: str = ""
    """The directory of the script, to recognise stack frames of the user's code."""
    master_port: int = 0
    worker_ports: int = 0
    """The number of ports that a node reserves for each worker."""
    uses_master_port: bool = False
    """Workers that train together always use ``master_port``."""
    max_restarts: int = 0
    restart_window_s: float | None = None
    restart_delay_s: tuple[float, float] = (0.0, 0.0)
    """The first and the longest delay before a restart. It doubles with each successive one."""
    min_uptime_s: float = 10.0
    grace_s: float = 25.0
    failure_grace_s: float = 5.0
    linger_s: float = 5.0
    """How long leftover processes may run on after the last worker has ended with 0."""
    hang_timeout_s: float | None = None
    """An attempt without a sign of activity for this long ends. None: never."""
    hang_action: HangAction = "stop"
    """``stop``: a hang ends the job. ``restart``: it ends the attempt. ``report``: it is reported,
    and the job continues."""
    hang_notice_s: float | None = None
    """Without ``hang_timeout_s`` and with several workers: after this much silence the user gets
    one notice about the workers."""
    terminal: bool = False
    """Whether the only worker has a pseudo-terminal. Ctrl-C then reaches the worker directly, and
    the launcher notices its exit."""
    repeated_term_kills: bool = True
    """A second TERM kills the workers, except under a scheduler, which repeats TERM."""
