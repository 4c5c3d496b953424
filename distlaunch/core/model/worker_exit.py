"""Describe how a worker exited: one record from the spawner to the diagnosis."""

from __future__ import annotations

from distlaunch.core.model.record import Record


class WorkerExit(Record):
    """How one worker exited.

    The spawner creates the record and sends it to the agent, which sends it to the coordinator. The
    worker table, the agent and the coordinator each add fields with ``replace``.
    """

    rank: int
    pid: int
    returncode: int
    """Exit code, or -N for death by signal N, as in subprocess."""

    # the worker table:
    attempt: int = -1
    uptime_s: float = 0.0
    ended: float = 0.0
    """Time in seconds on the agent's clock; in the coordinator, on the job's clock."""
    told_to_stop: bool = False
    """Whether the worker had received a stop signal."""

    # the agent, which has read what the worker left:
    stderr_tail: bytes = b""
    """The end of the worker's stderr or pseudo-terminal (up to 64 KiB; less if thousands of workers
    have failed)."""
    stdout_tail: str = ""
    """The end of a failed worker's stdout (up to 8 KiB). Empty with a pseudo-terminal."""
    traceback_age_s: float | None = None
    """Seconds from the last traceback on stderr to the exit, if there is one."""
    error_file: str | None = None
    """Content of the worker's TORCHELASTIC_ERROR_FILE (up to 256 KiB), if written."""
    oom_kills: int = 0
    """Number of OOM kills during the attempt, in the worker's cgroup or on the host."""
    shared_memory_bytes: int | None = None
    """Size of /dev/shm, if the worker failed. None if it is not known."""

    # the coordinator:
    host: str = ""
    local_rank: int = 0
    ended_s: float = 0.0
    """Seconds since the attempt began."""
