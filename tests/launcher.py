"""The launcher as a user runs it: a process of its own, which tests start, wait for and end."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PROGRAMS = Path(__file__).parent / "programs"
SURVIVOR_FIFO = "SURVIVOR_FIFO"
TRAINING = "torch,torch._dynamo"
"""Modules that a training with torch imports. The first step of an optimizer imports dynamo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one command of the launcher ended."""

    returncode: int
    stdout: str
    stderr: str
    stdout_bytes: bytes
    stderr_bytes: bytes
    run_dir: Path | None
    """The job's run directory, if it made one."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """``events.jsonl`` of that directory."""

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("type") == kind]

    def lines_of(self, rank: int) -> list[str]:
        """Return the output of a rank in attempt 0, from its file: the console may fold equal
        lines."""
        assert self.run_dir is not None
        return (self.run_dir / "attempt-0" / f"rank-{rank}.log").read_text().splitlines()


class Running:
    """A launcher that has been started. The fixture ends it."""

    def __init__(
        self, process: subprocess.Popen[bytes], out: Path, err: Path, jobs: Path, known: set[str]
    ) -> None:
        self.process = process
        self.pid = process.pid
        self._out, self._err, self._jobs, self._known = out, err, jobs, known

    @property
    def stdin(self):
        return self.process.stdin

    @property
    def stdout(self) -> str:
        return self._out.read_bytes().decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self._err.read_bytes().decode(errors="replace")

    @property
    def run_dir(self) -> Path | None:
        """The directory that the launcher names, else the first new one."""
        named = re.search(r"^distlaunch: job .*; logs: (/.*)$", self.stderr, re.MULTILINE)
        if named is not None and Path(named[1]).parent == self._jobs:
            return Path(named[1])
        new = sorted(set(job_names(self._jobs)) - self._known)
        return self._jobs / new[0] if new else None

    @property
    def events(self) -> list[dict[str, Any]]:
        run_dir = self.run_dir
        if run_dir is None or not (run_dir / "events.jsonl").exists():
            return []
        whole, _, _ = (run_dir / "events.jsonl").read_bytes().rpartition(b"\n")
        return [json.loads(line) for line in whole.splitlines()]

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait_event(self, kind: str, *, count: int = 1, timeout: float = 30.0) -> dict[str, Any]:
        """Return the ``count``-th event of this kind once it is in ``events.jsonl``."""

        def found() -> dict[str, Any] | None:
            matches = [event for event in self.events if event.get("type") == kind]
            return matches[count - 1] if len(matches) >= count else None

        return self.wait_for(found, f"event {kind!r}", timeout=timeout)

    def wait_workers(self, count: int, *, timeout: float = 30.0) -> list[int]:
        """Return the pids of ``count`` workers once so many have been started."""

        def found() -> list[int] | None:
            pids = [
                pid
                for event in self.events
                if event.get("type") == "workers_started"
                for pid in event["pids"].values()
            ]
            return pids if len(pids) >= count else None

        return self.wait_for(found, f"{count} workers", timeout=timeout)

    def wait_rank_logs(self, text: str, ranks: int, *, timeout: float = 30.0) -> None:
        """Wait until the files of so many ranks have the text: the console may fold equal lines."""

        def written() -> bool:
            logs = [] if self.run_dir is None else self.run_dir.glob("attempt-0/rank-*.log")
            return sum(text.encode() in log.read_bytes() for log in logs) == ranks

        self.wait_for(written, f"{text!r} of {ranks} ranks", timeout=timeout)

    def wait_stdout(self, text: str, *, timeout: float = 30.0) -> None:
        self.wait_for(lambda: text in self.stdout, f"{text!r} on stdout", timeout=timeout)

    def wait_stderr(self, text: str, *, timeout: float = 30.0) -> None:
        self.wait_for(lambda: text in self.stderr, f"{text!r} on stderr", timeout=timeout)

    def wait_for(self, condition: Callable[[], Any], what: str, *, timeout: float = 30.0) -> Any:
        """Return ``condition()`` once it is true. Fail if that takes too long or the launcher ends
        before."""
        deadline = time.monotonic() + timeout
        while True:
            ended = self.process.poll() is not None
            if value := condition():
                return value
            if ended or time.monotonic() > deadline:
                why = (
                    f"the launcher ended with {self.process.returncode}"
                    if ended
                    else f"{timeout} s passed"
                )
                pytest.fail(f"no {what}: {why}\n{self._screen()}")
            time.sleep(0.01)

    def signal_to_the_end(self, number: int) -> int:
        """Send a signal repeatedly from the filed verdict to the launcher's end. Return how
        often."""
        deadline = time.monotonic() + 60
        sent = 0
        events: Path | None = None
        while events is None or b'"job_ended"' not in events.read_bytes():
            if (
                events is None
                and (run_dir := self.run_dir) is not None
                and (run_dir / "events.jsonl").exists()
            ):
                events = run_dir / "events.jsonl"
            assert time.monotonic() < deadline, self._screen()
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self._screen()
            self.send_signal(number)
            sent += 1
            time.sleep(0.0002)
        return sent

    def wait(self, timeout: float = 60.0) -> Result:
        """Wait for the launcher's end. Kill it and fail the test after ``timeout`` seconds."""
        try:
            returncode = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"the launcher still ran after {timeout} s\n{self._screen()}")
        out, err = self._out.read_bytes(), self._err.read_bytes()
        return Result(
            returncode=returncode,
            stdout=out.decode(errors="replace"),
            stderr=err.decode(errors="replace"),
            stdout_bytes=out,
            stderr_bytes=err,
            run_dir=self.run_dir,
            events=self.events,
        )

    def _screen(self) -> str:
        return f"--- stdout\n{self.stdout[-4000:]}\n--- stderr\n{self.stderr[-4000:]}"


def job_names(jobs: Path) -> list[str]:
    if not jobs.is_dir():
        return []
    return [entry.name for entry in os.scandir(jobs) if entry.is_dir(follow_symlinks=False)]


_SIGNALS = ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "TSTP", "CONT", "CHLD", "TTIN", "TTOU")


def give_children_default_signals() -> None:
    """Let this process ignore signals by a handler, which a program that it starts does not inherit.

    Under nohup or in a script's background HUP, INT and QUIT are ignored, and a launcher would
    ignore them, too. ``preexec_fn`` would cost 20 ms for each process: Python forks for it, and
    pytest is large.
    """
    for name in _SIGNALS:
        number = getattr(signal, f"SIG{name}")
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


class Launcher:
    """Runs ``python -m distlaunch …`` with private state directories, and finds what its jobs leave
    running.

    Programs in ``tests/programs`` call ``survivor.hold()``: they open a FIFO for writing and pass
    it to all their descendants. Its reader here sees the end of file when the last of them is gone,
    without cookies, names or process groups.
    """

    def __init__(self, tmp_path: Path, env: Mapping[str, str]) -> None:
        self.tmp_path = tmp_path
        self.work = tmp_path / "work"
        self.jobs = tmp_path / "state" / "distlaunch" / "jobs"
        self._fifo = tmp_path / "survivors"
        runtime = tmp_path / "run"
        for directory in (self.work, tmp_path / "state", runtime):
            directory.mkdir(mode=0o700)
        os.mkfifo(self._fifo)
        self._reader = os.open(self._fifo, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.env = {
            **env,
            "XDG_STATE_HOME": str(tmp_path / "state"),
            "XDG_RUNTIME_DIR": str(runtime),
            SURVIVOR_FIFO: str(self._fifo),
        }
        self.python = sys.executable
        """The interpreter that runs the launcher. Workers can be forked from a preloaded module only
        if it is theirs, too."""
        self._started: list[Running] = []

    def pretend(self, *modules: str) -> None:
        """Put an empty module of each of these names where workers look, as if a framework were
        installed."""
        folder = self.tmp_path / "pretended"
        folder.mkdir(exist_ok=True)
        for module in modules:
            (folder / f"{module}.py").touch()
        self.env["PYTHONPATH"] = str(folder)

    def start(
        self,
        args: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        **popen: Any,
    ) -> Running:
        """Start the launcher; ``env`` is added to the minimal one, stdin is /dev/null, output goes
        to files."""
        words = [os.fspath(arg) for arg in args]
        jobs = self.jobs
        for word, following in zip(words, [*words[1:], ""], strict=True):
            if word == "--log-dir":
                jobs = (cwd or self.work) / following
            elif word.startswith("--log-dir="):
                jobs = (cwd or self.work) / word.partition("=")[2]
        number = len(self._started)
        out, err = self.tmp_path / f"stdout-{number}", self.tmp_path / f"stderr-{number}"
        known = set(job_names(jobs))
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = subprocess.Popen(
                [self.python, "-m", "distlaunch", *words],
                env={**self.env, **(env or {})},
                cwd=cwd or self.work,
                **{
                    "stdin": subprocess.DEVNULL,
                    "stdout": out_file,
                    "stderr": err_file,
                    **popen,
                },
            )
        running = Running(process, out, err, jobs, known)
        self._started.append(running)
        return running

    def run(
        self,
        args: Sequence[str | os.PathLike[str]],
        timeout: float = 60.0,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        **popen: Any,
    ) -> Result:
        """Run the launcher to its end."""
        return self.start(args, env=env, cwd=cwd, **popen).wait(timeout)

    def train(self, *args: str | os.PathLike[str], timeout: float = 60.0, **kwargs: Any) -> Result:
        """Run ``distlaunch train`` with these arguments."""
        return self.run(["train", *args], timeout, **kwargs)

    def train_warm(
        self,
        *args: str | os.PathLike[str],
        preload: str = TRAINING,
        timeout: float = 60.0,
        **kwargs: Any,
    ) -> Result:
        """Run ``distlaunch train`` with modules preloaded: one import serves all workers.

        For tests whose subject is not how workers are started. Imports take each cold worker 3 s
        of CPU if it trains with torch, 5 s with Accelerate.
        """
        return self.train("--preload", preload, *args, timeout=timeout, **kwargs)

    def assert_no_survivors(self, within_s: float = 20.0) -> None:
        """Fail unless every program that held the FIFO, and every helper of the launcher, is gone
        in time.

        Also fails if no program ever opened it: the test would prove nothing.
        """
        deadline = time.monotonic() + within_s
        opened = b""
        poller = select.poll()
        poller.register(self._reader, select.POLLIN)
        while True:
            poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            try:
                chunk = os.read(self._reader, 65536)
            except BlockingIOError:
                chunk = None
            if chunk:
                opened += chunk
            elif chunk == b"" and opened:
                break
            if time.monotonic() >= deadline:
                assert opened, (
                    "no test program opened the survivors' FIFO: call survivor.hold() in it"
                )
                pytest.fail(
                    f"{within_s} s after the launcher's end these still run:\n" + self._describe()
                )
            if chunk == b"":  # nobody has it open, nobody had
                time.sleep(0.01)
        while (left := self._related()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not left, f"helpers of the launcher still run:\n{self._describe()}"

    def survivors(self) -> list[int]:
        """Return the pids that hold the FIFO open or have its path in their environment, without
        launchers."""
        return [
            pid for pid in self._related() if pid not in {running.pid for running in self._started}
        ]

    def holding(self) -> list[int]:
        """Return the pids that hold the FIFO open at this moment."""
        return [pid for pid in self.survivors() if self._has_open(str(pid))]

    def _related(self) -> list[int]:
        found = []
        ours = {os.getpid()} | {
            running.pid for running in self._started if running.process.poll() is None
        }
        needle = str(self._fifo).encode()
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) in ours:
                continue
            try:
                if needle in Path(f"/proc/{name}/environ").read_bytes() or self._has_open(name):
                    found.append(int(name))
            except OSError:
                continue
        return found

    def _has_open(self, pid: str) -> bool:
        directory = f"/proc/{pid}/fd"
        try:
            return any(
                os.readlink(f"{directory}/{fd}") == str(self._fifo) for fd in os.listdir(directory)
            )
        except OSError:  # it ended, or closed something, meanwhile
            return False

    def _describe(self) -> str:
        lines = []
        for pid in self._related():
            try:
                command = (
                    Path(f"/proc/{pid}/cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                )
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            lines.append(f"  {pid} ({state}) {command}")
        return "\n".join(lines)

    def close(self) -> None:
        """End every launcher and all processes of its jobs, so that a failing test harms no
        other."""
        for running in self._started:
            if running.process.poll() is None:
                running.process.kill()
            running.process.wait()
            for stream in (running.process.stdin, running.process.stdout, running.process.stderr):
                if stream is not None:
                    stream.close()
        deadline = time.monotonic() + 30.0
        while (left := self._related()) and time.monotonic() < deadline:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.01)
        os.close(self._reader)
