"""Identify the launcher of a job, so that it can be found and signalled from outside."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from distlaunch.core.model.record import Record

_LONGEST_PID = 32
_CLOCK_S = 60.0
"""How much the time of day may have been changed since the file was written."""


class LauncherProcess(Record):
    """A process that differs from every other one, also from a later one with its pid."""

    host: str
    boot_id: str
    """Changes when the host restarts. Empty if unknown."""
    pid: int
    start_ticks: int
    """When it started, in clock ticks since the boot (field 22 of ``/proc/<pid>/stat``)."""
    slurm_job: str = ""
    """The Slurm job on whose node it runs; empty if it runs on no node of Slurm."""
    slurm_node: str = ""
    """Slurm's name of that node."""

    def is_of(self, host: str, boot_id: str) -> bool:
        """Return whether the process belongs to this boot of this host."""
        return (self.host, self.boot_id) == (host, boot_id)

    def is_alive(self) -> bool:
        """Return whether the process runs. Call it on its host only."""
        return start_ticks(self.pid) == self.start_ticks != 0

    def is_suspended(self) -> bool:
        """Return whether the process is stopped (Ctrl-Z, a debugger). Call it on its host only."""
        return self.is_alive() and _read_stat(self.pid)[:1] in ([b"T"], [b"t"])

    def fields(self) -> dict[str, object]:
        """Return the fields of the event ``job_started``."""
        of_slurm = {"slurm": {"job": self.slurm_job, "node": self.slurm_node}}
        return {
            "host": self.host,
            "boot_id": self.boot_id,
            "pid": self.pid,
            "start_ticks": self.start_ticks,
            **(of_slurm if self.slurm_job else {}),
        }


def this_process() -> LauncherProcess:
    """Return this process."""
    pid = os.getpid()
    job, node = (os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURMD_NODENAME"))
    return LauncherProcess(
        host=os.uname().nodename,
        boot_id=boot_id(),
        pid=pid,
        start_ticks=start_ticks(pid),
        slurm_job=job if node else "",
        slurm_node=node if job else "",
    )


def process_from(fields: Mapping[str, Any]) -> LauncherProcess | None:
    """Return the process of an event ``job_started``; None if it has none, as in older versions."""
    match fields:
        case {
            "host": str(host),
            "boot_id": str(boot),
            "pid": int(pid),
            "start_ticks": int(ticks),
        }:
            job, node = _read_slurm(fields.get("slurm"))
            return LauncherProcess(
                host=host,
                boot_id=boot,
                pid=pid,
                start_ticks=ticks,
                slurm_job=job,
                slurm_node=node,
            )
        case _:
            return None


def _read_slurm(value: object) -> tuple[str, str]:
    match value:
        case {"job": str(job), "node": str(node)}:
            return job, node
        case _:
            return "", ""


def boot_id() -> str:
    """Return the id of this boot of this machine; empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read().strip().decode()
    except OSError:
        return ""


def process_of_pid_file(path: str) -> LauncherProcess | None:
    """Return the process on this host whose id a file has; None if this user has no such process,
    or it started after the file was written.

    A later process with the same id is no launcher.
    """
    try:
        with open(path, "rb") as file:
            pid = int(file.read(_LONGEST_PID))
            age_s = time.time() - os.fstat(file.fileno()).st_mtime
        with open("/proc/uptime", "rb") as file:
            up_s = float(file.read().split()[0])
        if pid <= 0 or os.stat(f"/proc/{pid}").st_uid != os.getuid():
            return None
    except (OSError, ValueError):
        return None
    ticks = start_ticks(pid)
    ran_s = up_s - ticks / os.sysconf("SC_CLK_TCK")
    if not ticks or ran_s < age_s - _CLOCK_S:
        return None
    return LauncherProcess(host=os.uname().nodename, boot_id=boot_id(), pid=pid, start_ticks=ticks)


def is_suspended(pid: int) -> bool:
    """Return whether a process of this host is stopped by a signal, not by a debugger."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] == b"T"
    except OSError:
        return False


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since the boot; 0 if it is gone, or has ended
    and its parent has not noticed."""
    state, *fields = _read_stat(pid) or [b"X"]
    return 0 if state in (b"Z", b"X") or len(fields) < 19 else int(fields[18])


def _read_stat(pid: int) -> list[bytes]:
    """Return the fields of ``/proc/<pid>/stat`` from the state on; none if it cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may hold anything; the state follows it.
            return file.read().rpartition(b") ")[2].split()
    except OSError:
        return []
