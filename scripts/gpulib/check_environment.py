"""The environment of a check: the GPU, a deadline, and jobs of the real launcher that end with
it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchlib.process import Command, HangError, running

from .machine import Gpu, NoGpuError, ask_smi, forwarded

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WORKERS = os.path.join(ROOT, "scripts", "gpu_workers")
_SHOWN = 1500
"""Characters of what a job wrote that a failure shows."""


class CheckError(Exception):
    """Something was not as it should be; the message says what."""


class NotHereError(Exception):
    """A check cannot be made here; the message says why."""


class Job:
    """One started command of ``distlaunch``."""

    def __init__(self, command: Command, gpu_check: CheckEnvironment) -> None:
        self.command = command
        self._check = gpu_check
        self.folder = f"{command.directory}/jobs/job"
        """The run directory, if it is a job."""

    @property
    def stderr(self) -> str:
        """The launcher's output on stderr."""
        return self.command.errors()

    @property
    def stdout(self) -> str:
        """The launcher's output until it ended."""
        return self.command.output.decode(errors="replace")

    def end(self, *codes: int) -> Job:
        """Wait for the end within the check's limit. Raises CheckError unless it has one of these
        exit codes (0)."""
        try:
            self.command.process.wait(self._check.left_s())
        except subprocess.TimeoutExpired:
            raise CheckError(
                f"no end within {self._check.limit_s:g} s: {self.last_output()}"
            ) from None
        try:
            code = self.command.wait(within_s=1.0)
        except HangError as exc:
            raise CheckError(str(exc)) from exc
        if code not in (codes or (0,)):
            raise CheckError(
                f"exit code {code}, not {' or '.join(map(str, codes or (0,)))}: {self.last_output()}"
            )
        return self

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something while the job runs."""
        self.command.until(condition, what, within_s=self._check.left_s())

    def log(self, rank: int = 0, attempt: int = 0) -> list[str]:
        """Return the lines that a worker has written; none if it has not begun."""
        try:
            with open(
                f"{self.folder}/attempt-{attempt}/rank-{rank}.log",
                encoding="utf-8",
                errors="replace",
            ) as file:
                return file.read().splitlines()
        except FileNotFoundError:
            return []

    def observations(self, rank: int = 0, attempt: int = 0) -> dict[str, Any]:
        """Return what a worker has told. Raises CheckError if it has not."""
        for line in self.log(rank, attempt):
            if line.startswith("observed "):
                observations: dict[str, Any] = json.loads(line.removeprefix("observed "))
                return observations
        raise CheckError(f"rank {rank} of attempt {attempt} reported nothing: {self.last_output()}")

    def has_observations(self) -> bool:
        """Return whether rank 0 has printed its observations."""
        return any(line.startswith("observed ") for line in self.log())

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of this kind."""
        try:
            with open(f"{self.folder}/events.jsonl", encoding="utf-8") as file:
                events = [json.loads(line) for line in file if line.endswith("\n")]
        except FileNotFoundError:
            return []
        return [event for event in events if event.get("type") == kind]

    def last_output(self) -> str:
        """Return the last that the launcher wrote, for the message of a failure."""
        return self.stderr.strip()[-_SHOWN:] or "nothing on stderr"


class CheckEnvironment:
    """The GPU and the time that a check has; what it starts ends with the block."""

    def __init__(self, gpu: Gpu, environ: Mapping[str, str], *, limit_s: float) -> None:
        self.gpu = gpu
        self.limit_s = limit_s
        self._environ = environ
        self._until = time.monotonic() + limit_s
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> CheckEnvironment:  # noqa: PYI034 - Self is Python 3.11's
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def left_s(self) -> float:
        """Return how much of the time is left. Raises CheckError if none is."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise CheckError(f"not through within {self.limit_s:g} s")
        return left

    def train(
        self,
        program: str,
        *options: str,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Job:
        """Start a job of a program of gpu_workers."""
        return self.distlaunch(
            "train",
            "--format",
            "plain",
            "--log-dir",
            "jobs",
            "--job-id",
            "job",
            *options,
            f"{WORKERS}/{program}",
            *args,
            env=env,
        )

    def distlaunch(self, *words: str, env: Mapping[str, str] | None = None) -> Job:
        """Start a command of distlaunch, the one of this checkout, in a folder of its own."""
        self.left_s()

        def make(directory: str) -> tuple[list[str], dict[str, str]]:
            places = {"HOME": directory, "XDG_STATE_HOME": directory, "XDG_RUNTIME_DIR": directory}
            return [sys.executable, "-m", "distlaunch", *words], {
                **self._of_jobs(),
                **places,
                **(env or {}),
            }

        return Job(self._stack.enter_context(running(make)), self)

    def python(self, *words: str) -> str:
        """Run this interpreter, with this checkout on its path; return what it prints. Raises
        CheckError."""
        try:
            done = subprocess.run(
                [sys.executable, *words],
                env=self._of_jobs(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self.left_s(),
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CheckError(f"{words[0]} did not end within {self.limit_s:g} s") from None
        if done.returncode != 0:
            raise CheckError(
                f"{words[0]} ended with {done.returncode}: {done.stderr.strip()[-_SHOWN:]}"
            )
        return done.stdout

    def folder(self) -> str:
        """Return a new folder that is removed with the check."""
        import tempfile

        return self._stack.enter_context(tempfile.TemporaryDirectory(prefix="distlaunch-gpu-"))

    def memory_used_mib(self) -> int | None:
        """Return what nvidia-smi says of the GPU's memory; None where it does not know."""
        (line,) = self._smi(f"--id={self.gpu.uuid}", "--query-gpu=memory.used")
        return int(line) if line.isdigit() else None

    def holders(self) -> int:
        """Return how many processes nvidia-smi sees on the GPU: in a container mostly none, or only
        their number."""
        return len(self._smi(f"--id={self.gpu.uuid}", "--query-compute-apps=pid"))

    def _smi(self, *words: str) -> list[str]:
        try:
            return ask_smi(self._environ, *words)
        except NoGpuError as exc:
            raise CheckError(str(exc)) from exc

    def _of_jobs(self) -> dict[str, str]:
        path = self._environ.get("PYTHONPATH")
        return {
            **forwarded(self._environ),
            "PYTHONPATH": os.pathsep.join([ROOT, *([path] if path else [])]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }


def expect(observations: Mapping[str, Any], **wanted: Any) -> None:
    """Raise CheckError for all that was told otherwise."""
    wrong = [
        f"{name} is {observations.get(name)!r}, not {value!r}"
        for name, value in wanted.items()
        if observations.get(name) != value
    ]
    if wrong:
        raise CheckError("; ".join(wrong))


def expect_that(condition: object, otherwise: str) -> None:
    """Raise CheckError with this message if the condition does not hold."""
    if not condition:
        raise CheckError(otherwise)
