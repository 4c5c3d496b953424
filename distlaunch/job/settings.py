"""Layer job: what the policy goes by, fixed for a whole job. Pure data."""

from __future__ import annotations

from distlaunch.core.model.record import Record
from distlaunch.resolve.dialect import Dialect


class PolicySettings(Record):
    """What does not change during a job. Times are seconds."""

    hosts: tuple[str, ...]
    """By node rank."""
    first_ranks: tuple[int, ...]
    """The lowest rank of each node, by node rank."""
    world_size: int
    python: str | None = None
    """The workers' interpreter, for hints; None if they are no Python."""
    script_dir: str = ""
    """Where the script is: tells the user's code from libraries in stacks."""
    master_port: int = 0
    max_restarts: int = 0
    restart_window_s: float | None = None
    min_uptime_s: float = 10.0
    grace_s: float = 25.0
    failure_grace_s: float = 5.0
    hang_timeout_s: float | None = None
    """End an attempt whose workers show no sign of life for so long; None: never."""
    terminal: bool = False
    """The one worker has a pseudo-terminal: Ctrl-C reaches it without us, and shows in how it ends."""
    dialect: Dialect = Dialect()
    """What options are called, for hints."""
    repeated_term_kills: bool = True
    """False under a scheduler, which sends TERM again and again."""
