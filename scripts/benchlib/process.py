"""Run one command of a benchmark: started, watched through /proc, ended by pid, and nothing left
behind."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class BenchError(Exception):
    """A command did not do what is measured: its figure would mean nothing."""


class HangError(BenchError):
    """A command did not end in the time given."""


def now_ns() -> int:
    return time.monotonic_ns()


def status_kib(pid: int, field: str) -> int:
    """Return a size of /proc/PID/status in KiB (0 when the process is gone)."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith(f"{field}:"):
                    return int(line.split()[1])
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


def context_switches(pids: Sequence[int]) -> int:
    """Return how often the threads of these processes have been scheduled: each wake-up of an idle
    one is one."""
    total = 0
    for pid in pids:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(
                f"/proc/{pid}/task/{task}/status", encoding="ascii", errors="replace"
            ) as file:
                total += sum(int(line.split()[1]) for line in file if "ctxt_switches" in line)
    return total


def cpu_s(pid: int) -> float:
    """Return how much processor time a process has used, all its threads together."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        words = file.read().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


Start = Callable[..., tuple["subprocess.Popen[bytes]", int]]
"""As ``subprocess.Popen``; gives beside the process to wait for the pid of the command itself."""


def start_here(argv: Sequence[str], **popen: Any) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command on this machine."""
    process = subprocess.Popen(argv, **popen)
    return process, process.pid


class Command:
    """One started launcher. All its processes carry BENCH_DIR in their environment, which is how
    they are found."""

    def __init__(
        self, argv: Sequence[str], env: dict[str, str], directory: str, *, start: Start = start_here
    ) -> None:
        self.directory = directory
        self._errors_path = f"{directory}/stderr"
        self._marker = f"BENCH_DIR={directory}".encode()
        self.output = b""
        self.last_output_ns = 0
        with open(self._errors_path, "wb") as errors:
            self.started_ns = now_ns()
            self.process, self.pid = start(
                argv,
                env=env,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self.ended_ns = 0
        self.peaks = {"VmHWM": 0, "VmRSS": 0, "Threads": 0, "fds": 0}
        self.last = dict(self.peaks)
        self.sizes_kib: list[int] = []
        """What ``sample`` has seen of the launcher's memory, in order."""
        self._stop = threading.Event()
        self._chunks: list[bytes] = []
        self._threads = [threading.Thread(target=self._read)]
        self._threads[0].start()

    def sample(self, every_s: float) -> None:
        """Follow the launcher's memory, threads and descriptors in a thread until it ends."""

        def follow() -> None:
            while not self._stop.wait(every_s):
                for field in ("VmHWM", "VmRSS", "Threads"):
                    self._note(field, status_kib(self.pid, field))
                self.sizes_kib.append(self.last["VmRSS"])
                try:
                    self._note("fds", len(os.listdir(f"/proc/{self.pid}/fd")))
                except (FileNotFoundError, ProcessLookupError, PermissionError):
                    return

        self._threads.append(threading.Thread(target=follow))
        self._threads[-1].start()

    def _note(self, field: str, value: int) -> None:
        if value:
            self.last[field] = value
            self.peaks[field] = max(self.peaks[field], value)

    def _read(self) -> None:
        stream = self.process.stdout
        if stream is None:
            raise BenchError("no pipe")
        while chunk := os.read(stream.fileno(), 1 << 20):
            self.last_output_ns = now_ns()
            self._chunks.append(chunk)

    def stamps(
        self,
        name: str,
        attempt: int,
        count: int,
        *,
        within_s: float,
        ranks: Sequence[int] | None = None,
    ) -> list[int]:
        """Wait until ``count`` ranks (or these ``ranks``) have written this stamp; return the
        times."""
        paths = [f"{self.directory}/{name}-{attempt}-{rank}" for rank in ranks or range(count)]
        self.until(
            lambda: all(os.path.exists(path) for path in paths),
            f"{count} stamps {name!r}",
            within_s=within_s,
        )
        times = []
        for path in paths:
            with open(path, encoding="ascii") as file:
                times.append(int(file.read()))
        return times

    def until(self, condition: Callable[[], bool], what: str, *, within_s: float) -> None:
        """Wait for a condition without the launcher noticing."""
        deadline = now_ns() + int(within_s * 1e9)
        while not condition():
            ended = self.process.poll() is not None and not condition()
            if ended or now_ns() > deadline:
                raise BenchError(
                    f"no {what}; {'it ended' if ended else 'too late'}\n{self.errors()[-1500:]}"
                )
            time.sleep(0.01)

    def wait(self, *, within_s: float) -> int:
        """Wait for the launcher's end, note the instant, and return its exit code."""
        pidfd = os.pidfd_open(self.process.pid) if self.process.poll() is None else None
        if pidfd is not None:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            ended = poller.poll(within_s * 1000)
            self.ended_ns = now_ns()
            os.close(pidfd)
            if not ended:
                raise HangError(f"still running after {within_s} s\n{self.errors()[-1500:]}")
        else:
            self.ended_ns = now_ns()
        code = self.process.wait()
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=10)
        self.output = b"".join(self._chunks)
        return code

    def related(self) -> dict[int, str]:
        """Return all processes of this run but the launcher: pids, with their command lines."""
        found = {}
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) in {self.pid, self.process.pid, os.getpid()}:
                continue
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if self._marker not in file.read().split(b"\0"):
                        continue
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    found[int(name)] = (
                        file.read().replace(b"\0", b" ").decode(errors="replace").strip()
                    )
            except OSError:
                continue
        return {pid: command for pid, command in found.items() if command}

    def errors(self) -> str:
        """Return what the launcher wrote to stderr."""
        with open(self._errors_path, encoding="utf-8", errors="replace") as file:
            return file.read()

    def close(self) -> None:
        """Kill whatever is left of this run, by pid."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        deadline = now_ns() + 5_000_000_000
        while (left := self.related()) and now_ns() < deadline:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.01)
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=10)
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def running(
    make: Callable[[str], tuple[Sequence[str], dict[str, str]]], *, start: Start = start_here
) -> Iterator[Command]:
    """Start the command that ``make`` builds for a fresh directory, and clean up after it in every
    case."""
    directory = tempfile.mkdtemp(prefix="distlaunch-bench-")
    try:
        argv, env = make(directory)
        command = Command(argv, {**env, "BENCH_DIR": directory}, directory, start=start)
        try:
            yield command
        finally:
            command.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
