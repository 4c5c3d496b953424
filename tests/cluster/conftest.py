"""Real clusters for tests, brought up by ``scripts/testbed``: ``slurm`` is Slurm of this machine's
packages, under each process tracker; ``hosts`` are machines with a network and a real sshd each.

The keeper of the test bed takes it down when its stdin closes, so even a killed pytest leaves
nothing behind.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster, TestbedError

TESTBED = Path(__file__).parents[2] / "scripts" / "testbed"
ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a batch job ended."""

    job_id: int
    state: str
    exit_code: str
    """As scontrol writes it: ``CODE:SIGNAL``."""
    output: str


class Slurm:
    """The commands of a running Slurm, in a minimal environment; each is killed when it takes too
    long."""

    def __init__(
        self,
        work: Path,
        *,
        tracker: str,
        directory: str,
        enter: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        self.directory = Path(directory)
        self.enter = enter
        self.tracker = tracker
        self.work = work
        self._hostnames: dict[str, list[str]] = {}
        self.environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(work),
            "LANG": "C.UTF-8",
            "SHELL": "/bin/sh",
            **environment,
        }

    def run(self, *words: str, stdin: str = "", timeout_s: float = 30.0, **variables: str) -> str:
        """Run a command as a user of this Slurm, and return its stdout. Fail the test if it
        fails."""
        done = subprocess.run(
            # Inside the sandbox: outside, what srun forked would wait for ever for a controller
            # that is gone.
            [*self.enter, "env", "--chdir", self.work, *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**self.environment, **variables},
            check=False,
        )
        assert done.returncode == 0, (
            f"{words} ended with {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done.stdout

    def submit(self, script: str, *options: str, **variables: str) -> int:
        """Queue a batch script and return the job's id."""
        words = ("sbatch", "--parsable", f"--output={self.work}/%j.out", *options)
        return int(self.run(*words, stdin=f"#!/bin/sh\n{script}\n", **variables))

    def wait(self, *job_ids: int, timeout_s: float = 60.0) -> list[Finished]:
        deadline = time.monotonic() + timeout_s
        while True:
            lines = self.run("scontrol", "--oneliner", "show", "job").splitlines()
            jobs = {
                int(fields["JobId"]): fields
                for fields in (dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines)
            }
            waiting = [job_id for job_id in job_ids if jobs[job_id]["JobState"] not in ENDED]
            if not waiting:
                return [self._finished(job_id, jobs[job_id]) for job_id in job_ids]
            if time.monotonic() > deadline:
                pytest.fail(f"jobs {waiting} have not ended in {timeout_s} s\n{self.run('squeue')}")
            time.sleep(0.1)

    def _finished(self, job_id: int, fields: Mapping[str, str]) -> Finished:
        output = (self.work / f"{job_id}.out").read_text(errors="replace")
        return Finished(
            job_id=job_id, state=fields["JobState"], exit_code=fields["ExitCode"], output=output
        )

    def sbatch(
        self, script: str, *options: str, timeout_s: float = 60.0, **variables: str
    ) -> Finished:
        """Run a batch script to its end."""
        return self.wait(self.submit(script, *options, **variables), timeout_s=timeout_s)[0]

    def srun(self, *words: str, **variables: str) -> str:
        return self.run("srun", *words, **variables)

    def salloc(
        self, script: str, *options: str, interactive: bool = False, **variables: str
    ) -> str:
        """Type a script into the shell of ``salloc``: on this machine, or (``interactive``) in a
        step on the first node."""
        if interactive:
            variables["SLURM_CONF"] = str(self.directory / "etc" / "interactive.conf")
            return self.run("salloc", *options, stdin=script, **variables)
        return self.run("salloc", *options, "sh", stdin=script, **variables)

    def hostnames(self, nodelist: str) -> list[str]:
        """Expand a node list as Slurm does."""
        if nodelist not in self._hostnames:
            self._hostnames[nodelist] = self.run("scontrol", "show", "hostnames", nodelist).split()
        return self._hostnames[nodelist]


@pytest.fixture(scope="session", params=["linuxproc", "cgroup"])
def slurm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Slurm]:
    """Return a Slurm of four nodes (n1 to n4), 64 CPUs and fake GPUs on each."""
    work = tmp_path_factory.mktemp("slurm")
    with (work / "testbed.err").open("wb") as errors:
        keeper = subprocess.Popen(
            [sys.executable, TESTBED, "slurm", "hold", "--tracker", request.param],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    try:
        answer = json.loads(keeper.stdout.readline() or '{"error": "the test bed ended at once"}')
        if "environment" in answer:
            yield Slurm(work, tracker=request.param, **answer)
        else:
            pytest.skip(
                f"Slurm cannot run here: {answer['error']}\n{(work / 'testbed.err').read_text()}"
            )
    finally:
        keeper.communicate(timeout=60)
    assert keeper.returncode == 0, (work / "testbed.err").read_text()
    assert not Path(answer["directory"]).exists()


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Return a function that brings up a test bed: ``make_hosts(2, "--networks=2")``; after the test
    nothing may run there."""
    made: list[Cluster] = []

    def make(count: int = 4, *options: str) -> Cluster:
        try:
            cluster = Cluster.started(count, *options)
        except TestbedError as error:
            if not any(
                reason in str(error) for reason in ("needs root", "does not allow", "not installed")
            ):
                raise
            pytest.skip(f"hosts cannot run here: {error}")
        made.append(cluster)
        cluster.begin(tmp_path)
        return cluster

    try:
        yield make
        for cluster in made:
            cluster.assert_clean()
    finally:
        for cluster in made:
            cluster.close()


@pytest.fixture
def hosts(make_hosts: Callable[..., Cluster]) -> Cluster:
    """Return four hosts (n1 to n4) and the head, fresh for each test: they are up in a quarter of a
    second."""
    return make_hosts()
