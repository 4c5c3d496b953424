"""A job of ``programs/nodes/logs_signals.py`` in a batch script of the test bed's Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.conftest import ENDED

ROOT = Path(__file__).parents[2]
LOGS_SIGNALS = ROOT / "tests" / "programs" / "nodes" / "logs_signals.py"
SHORT = "--failure-grace 2 --grace 20"


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    words: list[str]
    node: str
    job: int


def processes(slurm) -> list[Process]:
    """Return all processes of this Slurm: its daemons, its steps, and their descendants."""
    mine = f"SLURM_CONF={slurm.environment['SLURM_CONF']}"
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            words = (
                Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            )
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if mine in environ and words and stat[0] != "Z":
                reports = dict(entry.partition("=")[::2] for entry in environ)
                job = int(reports.get("SLURM_JOB_ID") or 0)
                node = reports.get("SLURMD_NODENAME", "")
                found.append(Process(int(pid), int(stat[1]), words, node, job))
    return found


def until(condition: Callable[[], Any], what: str, within_s: float = 60.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{within_s} s passed waiting for {what}"
        time.sleep(0.05)
    return found


class Job:
    """A batch job; ``options`` are sbatch's, ``train`` those of distlaunch.

    ``size`` says how many workers there are; by default one a node, or with GPUs in ``options`` one
    a GPU.
    """

    def __init__(
        self,
        slurm,
        options: str,
        *,
        train: str = "",
        words: str = "",
        script: str = "exec {}",
        size: str | None = None,
    ) -> None:
        self.slurm = slurm
        self.folder = slurm.work / f"place-{time.monotonic_ns()}"
        self.folder.mkdir()
        command = f"{shlex.quote(sys.executable)} -m distlaunch train --device cuda {SHORT} {train} {LOGS_SIGNALS} {words}"
        if size is not None or ("--gpu" not in options and "--gres" not in options):
            command = command.replace("--device cuda", size or "--procs-per-node 1")
        text = (
            f"export SIGN_DIR={self.folder} XDG_STATE_HOME={slurm.work}/state PYTHONPATH={ROOT}\n"
            + script.format(command)
        )
        self.id = slurm.submit(text, "--open-mode=append", *options.split())

    @property
    def output(self) -> str:
        path = self.slurm.work / f"{self.id}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def reports(self, attempt: int = 0) -> list[dict[str, str | None]]:
        """Return the first reports of the workers of an attempt that run, by rank."""
        files = [path for path in self.folder.glob(f"{attempt}-*") if path.suffix != ".new"]
        files.sort(key=lambda path: int(path.name.partition("-")[2]))
        return [json.loads(path.read_text().splitlines()[0]) for path in files]

    def up(
        self, count: int, attempt: int = 0, within_s: float = 60.0
    ) -> list[dict[str, str | None]]:
        """Wait until so many workers run."""

        def found() -> list[dict[str, str | None]] | None:
            reports = self.reports(attempt)
            assert len(reports) == count or self.fields()["JobState"] not in ENDED, (
                f"{self.fields()}\n{self.output}"
            )
            return reports if len(reports) == count else None

        try:
            return until(found, f"{count} workers", within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from None

    def signals_got(self, attempt: int = 0) -> list[list[str]]:
        """Return the lines that each worker has written since its start, by rank."""
        ranks = range(len(self.reports(attempt)))
        return [(self.folder / f"{attempt}-{rank}").read_text().splitlines()[1:] for rank in ranks]

    def wait_signals(self, *lines: str, attempt: int = 0) -> None:
        """Wait until every worker has written just these lines."""
        try:
            until(
                lambda: all(each == list(lines) for each in self.signals_got(attempt)), f"{lines}"
            )
        except AssertionError as error:
            raise AssertionError(
                f"{error}, not {self.signals_got(attempt)}\n{self.output}"
            ) from None

    def enough(self) -> None:
        (self.folder / "enough").touch()

    def fail(self, rank: int, attempt: int = 0) -> None:
        (self.folder / f"fail-{attempt}-{rank}").touch()

    def next_turn(self, count: int) -> None:
        """Make Slurm start the next turn of a requeued job now, not in two minutes, and check the
        restart count."""
        # In the second in which a job was ended, its nodes refuse it.
        self.slurm.run("scontrol", "update", f"JobId={self.id}", "StartTime=now+2")
        assert {each["TORCHELASTIC_RESTART_COUNT"] for each in self.up(count, attempt=1)} == {"1"}
        self.enough()

    def fields(self) -> dict[str, str]:
        """Return the job's fields of ``scontrol show job``."""
        line = self.slurm.run("scontrol", "--oneliner", "show", "job", str(self.id))
        return dict(word.partition("=")[::2] for word in line.split())

    def wait(self, timeout_s: float = 60.0):
        done = self.slurm.wait(self.id, timeout_s=timeout_s)[0]
        self.assert_clean()
        return done

    def wait_launcher(self) -> None:
        """Wait until the launcher has ended, and srun with it; Slurm may wait for a node that is
        dead."""

        def there() -> list[Process]:
            return [
                each
                for each in processes(self.slurm)
                if each.job == self.id and not each.words[0].startswith("slurm")
            ]

        until(lambda: not there(), f"the end of {there()}", 30)

    def agent(self, node: str) -> Process:
        [found] = [
            each for each in processes(self.slurm) if self._is_agent(each) and each.node == node
        ]
        return found

    def launcher(self, node: str | None = None) -> Process:
        """Return its only launcher, or that on a node."""
        found = [
            each
            for each in processes(self.slurm)
            if self._is_launcher(each) and node in (None, each.node)
        ]
        assert len(found) == 1, found
        return found[0]

    def processes(self, *names: str) -> list[Process]:
        """Return its processes whose program has one of these names or beginnings."""
        mine = [each for each in processes(self.slurm) if each.job == self.id]
        return [
            each
            for each in mine
            if each.words[0].rpartition("/")[2].startswith(names) or each.words[0] in names
        ]

    def _is_launcher(self, process: Process) -> bool:
        return process.job == self.id and process.words[1:4] == ["-m", "distlaunch", "train"]

    def _is_agent(self, process: Process) -> bool:
        return process.job == self.id and process.words[0].startswith("dl-agent")

    def assert_clean(self, within_s: float = 30.0) -> None:
        """Check that no process of the job is left, not even a daemon that left its session."""

        def left() -> list[Process]:
            return [each for each in processes(self.slurm) if each.job == self.id]

        until(lambda: not left(), f"the end of {left()}", within_s)


@contextlib.contextmanager
def node_killed(slurm, node: str) -> Iterator[None]:
    """Kill all processes of a node at once: slurmd, slurmstepd, and what these have started.
    Restart slurmd at the end."""
    there = processes(slurm)
    by_pid = {each.pid: each for each in there}
    doomed = {each.pid for each in there if each.node == node}
    doomed |= {each.parent for each in there if each.pid in doomed and each.parent in by_pid}
    doomed = {
        pid
        for pid in doomed
        if by_pid[pid].node == node or by_pid[pid].words[0].startswith("slurmstepd")
    }
    doomed |= {
        each.pid for each in there if each.words[0].endswith("slurmd") and each.words[-1] == node
    }
    assert len(doomed) >= 3, there
    # Children first: where a parent dies before them, the kernel sends HUP to a stopped group that
    # is orphaned.
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in sorted(doomed, reverse=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
    try:
        yield
    finally:
        slurmd = shutil.which("slurmd", path=os.environ["PATH"] + ":/usr/sbin")
        slurm.run(slurmd, "-N", node)
        # sinfo may go on to call the node "mixed" when nothing is allocated there any more (Slurm
        # 22.05).
        until(
            lambda: "State=IDLE " in slurm.run("scontrol", "show", "node", node),
            f"{node} to be back",
        )
