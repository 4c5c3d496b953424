"""The launcher on a test bed of hosts: ``Cluster`` adds launchers of jobs to
``testbedlib.client.Hosts``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
if SCRIPTS not in sys.path:
    sys.path.append(SCRIPTS)

from testbedlib import faults, sandbox
from testbedlib.client import Hosts, Process, Started, until
from testbedlib.layout import HEAD
from testbedlib.sandbox import TestbedError

from tests.launcher import Result, Running, job_names

__all__ = [
    "HEAD",
    "Cluster",
    "Hosts",
    "Process",
    "RunningOnHost",
    "Started",
    "TestbedError",
    "faults",
    "sandbox",
    "until",
]


class RunningOnHost(Running):
    """A launcher on a host. Signals reach the launcher, not the command that entered the host."""

    def __init__(self, started: Started, out: Path, err: Path, jobs: Path, known: set[str]) -> None:
        super().__init__(started.process, out, err, jobs, known)
        self.pid = started.pid
        self._started = started

    def send_signal(self, number: int) -> None:
        self._started.send_signal(number)


class Cluster(Hosts):
    """Hosts, and jobs that start on one of them. ``tmp_path`` is the same directory on all."""

    work: Path
    jobs: Path

    def begin(self, tmp_path: Path) -> None:
        """Make the directories of a test's jobs."""
        self.work = tmp_path / "work"
        self.jobs = tmp_path / "state" / "distlaunch" / "jobs"
        self._tmp_path = tmp_path
        self._running: list[RunningOnHost] = []
        runtime = tmp_path / "run"
        for directory in (self.work, tmp_path / "state", runtime):
            directory.mkdir(mode=0o700, exist_ok=True)
        self.env = {
            **self.env,
            "XDG_STATE_HOME": str(tmp_path / "state"),
            "XDG_RUNTIME_DIR": str(runtime),
        }

    def start(
        self,
        args: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        host: str = HEAD,
        **popen: Any,
    ) -> RunningOnHost:
        """Start the launcher; ``env`` is added to the minimal one, stdin is /dev/null, output goes
        to files."""
        number = len(self._running)
        out, err = self._tmp_path / f"stdout-{number}", self._tmp_path / f"stderr-{number}"
        known = set(job_names(self.jobs))
        with out.open("wb") as out_file, err.open("wb") as err_file:
            defaults = {
                "stdin": subprocess.DEVNULL,
                "stdout": out_file,
                "stderr": err_file,
            }
            started = self.launch(
                args,
                host=host,
                cwd=cwd or self.work,
                env=env,
                **{**defaults, **popen},
            )
        running = RunningOnHost(started, out, err, self.jobs, known)
        self._running.append(running)
        return running

    def train(self, *args: str | os.PathLike[str], timeout: float = 60.0, **start: Any) -> Result:
        """Run ``distlaunch train`` to its end."""
        return self.start(["train", *args], **start).wait(timeout)

    def close(self) -> None:
        """End the test bed with all that runs on it."""
        super().close()
        for running in getattr(self, "_running", []):
            running.process.wait(timeout=30)
            for stream in (running.process.stdin, running.process.stdout, running.process.stderr):
                if stream is not None:
                    stream.close()
