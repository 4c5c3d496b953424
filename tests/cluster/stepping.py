"""A job of ``programs/nodes/steps.py`` on the test bed's hosts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.hosts import HEAD, Cluster, Process, until
from tests.launcher import Result

STEPS = Path(__file__).parents[1] / "programs" / "nodes" / "steps.py"
SHORT = ("--failure-grace", "2", "--grace", "2")
SLEEPS = ("1000", "1001", "1002")
"""The last words of a worker's child and its daemons."""
AGENT, SPAWNER, WATCHER = "dl-agent", "dl-spawner", "dl-watcher"


class Stepping:
    """A job that counts steps. ``folder`` is a directory of its own, which all hosts share."""

    def __init__(
        self,
        hosts: Cluster,
        nodes: str,
        *options: str | os.PathLike[str],
        words: Sequence[str] = (),
        name: str = "job",
        host: str = HEAD,
        env: Mapping[str, str] | None = None,
        **popen: Any,
    ) -> None:
        self.hosts = hosts
        self.folder = hosts.work / name
        self.folder.mkdir()
        args = [
            "train",
            *(("--hosts", nodes) if nodes else ()),
            "--device",
            "cpu",
            *SHORT,
            *options,
            STEPS,
            *words,
        ]
        self.running = hosts.start(
            args, host=host, env={"SIGN_DIR": str(self.folder), **(env or {})}, **popen
        )

    # --- how it goes

    def up(self, attempt: int = 0, *, timeout: float = 60.0) -> list[dict[str, Any]]:
        """Wait until all workers of an attempt run. Return what each of them reports, by rank."""
        folder = self.folder / f"attempt-{attempt}"

        def found() -> list[dict[str, Any]] | None:
            files = [path for path in folder.glob("*") if path.suffix != ".new"]
            reported = {int(path.name): json.loads(path.read_text()) for path in files}
            size = next((int(each["WORLD_SIZE"]) for each in reported.values()), 0)
            return (
                [reported[rank] for rank in range(size)] if size and len(reported) == size else None
            )

        return self.running.wait_for(found, f"all of attempt {attempt}", timeout=timeout)

    def wait_attempt(
        self, composition: Sequence[str], *, after: int = 0, timeout: float = 60.0
    ) -> int:
        """Wait until workers run on just these hosts (one each), in an attempt after ``after``.
        Return its number."""

        def found() -> int:
            numbers = sorted(int(path.name[8:]) for path in self.folder.glob("attempt-*"))
            for number in [number for number in numbers if number > after]:
                folder = self.folder / f"attempt-{number}"
                files = [path for path in folder.glob("*") if path.suffix != ".new"]
                reported = {int(path.name): json.loads(path.read_text()) for path in files}
                on = [reported[rank]["host"] for rank in sorted(reported)]
                if on == list(composition) and {
                    each["WORLD_SIZE"] for each in reported.values()
                } == {str(len(on))}:
                    return number
            return 0

        return self.running.wait_for(found, f"an attempt on {composition}", timeout=timeout)

    @property
    def step(self) -> int:
        path = self.folder / "step"
        return int(path.read_text()) if path.exists() else 0

    def goes_on(self, *, by: int = 5, timeout: float = 30.0) -> None:
        """Wait until the job has made some more steps."""
        before = self.step
        self.running.wait_for(
            lambda: self.step >= before + by, f"steps beyond {before}", timeout=timeout
        )

    # --- what it is told

    def fail(self) -> None:
        """Make rank 0 fail."""
        (self.folder / "fail").touch()

    def enough(self, timeout: float = 60.0) -> Result:
        """Let the job end with 0."""
        (self.folder / "enough").touch()
        result = self.running.wait(timeout)
        assert result.returncode == 0, result.stderr
        return result

    # --- its processes

    def pids(self) -> set[int]:
        return {process.pid for process in self.processes()}

    def processes(self) -> list[Process]:
        """Return all processes of the job on all hosts, the launcher included."""
        return [process for name in self.hosts.layout for process in self.hosts.processes(name)]

    def find(self, host: str, what: str) -> Process:
        """Find the agent or the spawner on a host."""
        found = [
            process for process in self.hosts.processes(host) if process.argv[0].startswith(what)
        ]
        assert len(found) == 1, found
        return found[0]

    def kill(self, host: str, what: str) -> None:
        """Kill -9 the agent or the spawner on a host."""
        os.kill(self.find(host, what).pid, signal.SIGKILL)


def is_empty(hosts: Cluster, *names: str, but: Sequence[int] = ()) -> bool:
    """Return whether nothing runs on these hosts."""
    return not [each for name in names for each in hosts.processes(name) if each.pid not in but]


def wait_empty(
    hosts: Cluster, *names: str, within_s: float = 30.0, but: Sequence[int] = ()
) -> None:
    """Wait until nothing runs on these hosts."""
    until(lambda: is_empty(hosts, *names, but=but), f"the end of all on {names}", within_s)


@contextlib.contextmanager
def beside(hosts: Cluster, nodes: str) -> Iterator[set[int]]:
    """Run another job on these hosts and yield its pids. Check at the end that all of them are
    still there."""
    other = Stepping(hosts, nodes, name="beside")
    workers = len(other.up())
    other.goes_on()
    until(
        lambda: sum(each.argv[-1] in SLEEPS for each in other.processes()) == 3 * workers,
        "all that workers start",
    )
    pids = other.pids()
    yield pids
    assert pids <= other.pids()
    other.goes_on()
    other.enough()
