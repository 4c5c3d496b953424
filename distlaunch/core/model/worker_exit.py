"""How a worker ended, from the spawner that sees it to the diagnosis."""

from __future__ import annotations

from distlaunch.core.model.record import Record


class WorkerExit(Record):
    """How one worker ended.

    The spawner makes it. The worker table, the agent and the coordinator each add their fields with
    ``replace``, and it crosses the wire between them as a message.
    """

    rank: int
    pid: int
    returncode: int
    """Exit code, or -N for death by signal N (as subprocess has it)."""

    # the worker table:
    attempt: int = -1
    uptime_s: float = 0.0
    ended: float = 0.0
    """When, on the agent's clock; in the coordinator, on the job's clock."""
    told_to_stop: bool = False
    """A stop had been sent to it before it ended."""

    # the agent, which has read what the worker left:
    stderr_tail: bytes = b""
    """The last bytes that it wrote to stderr (up to 64 KiB; with a pty: of its terminal). In the
    coordinator fewer, where thousands of workers have failed."""
    error_file: str | None = None
    """Text of its TORCHELASTIC_ERROR_FILE (capped at 256 KiB), if it wrote one."""
    oom_kills: int = 0
    """How many OOM kills the kernel counted for its cgroup (or the host) during the attempt."""

    # the coordinator:
    host: str = ""
    local_rank: int = 0
    ended_s: float = 0.0
    """Seconds since the attempt began."""
