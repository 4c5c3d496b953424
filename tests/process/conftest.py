"""Jobs of the programs in ``tests/programs``, which communicate with the test by signs: files in
their working directory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from distlaunch.coordinator.policy.signals import SECOND_S

PROGRAMS = Path(__file__).parents[1] / "programs"
SRUN = PROGRAMS / "nodes" / "srun.sh"
SPAWNER = "dl-spawner"
WATCHER = "dl-watcher"
SERVER = "dl-warm"


SLURM_WORKER = """
import os, signal, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", os.environ["SLURMD_NODENAME"], flush=True)
print("token", os.environ.get("DISTLAUNCH_TOKEN"), flush=True)
while "stay" in sys.argv:
    time.sleep(0.1)
"""


def until(condition: Callable[[], Any], what: str, *, within_s: float = 30.0) -> Any:
    """Return ``condition()`` once it is true."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {within_s} s: {what}")
        time.sleep(0.005)
    return value


def later_than_a_double() -> None:
    """Wait until the next signal counts as a second one."""
    began = time.monotonic()
    until(lambda: time.monotonic() > began + 1.1 * SECOND_S, "nobody takes both for one")


def state_of(pid: int) -> str | None:
    """Return the state letter of a process, if it exists."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_alive(pid: int) -> bool:
    return state_of(pid) not in (None, "Z", "X")


def children_of(pid: int) -> list[int]:
    try:
        return [
            int(child)
            for task in os.listdir(f"/proc/{pid}/task")
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return []


def child_named(pid: int, name: str) -> int | None:
    """Return a child of a process by its name in ``ps``."""
    for child in children_of(pid):
        try:
            if Path(f"/proc/{child}/comm").read_text().strip() == name and is_alive(child):
                return child
        except (FileNotFoundError, ProcessLookupError):
            continue
    return None


def spawner_below(pid: int) -> int | None:
    """Return the spawner of a launcher or an agent: a child of the watcher, or its own if the
    watcher was killed."""
    watcher = child_named(pid, WATCHER)
    return child_named(pid if watcher is None else watcher, SPAWNER)


class Job:
    """Starts the launcher with a program of ours, and waits for its signs."""

    until = staticmethod(until)
    state_of = staticmethod(state_of)
    is_alive = staticmethod(is_alive)
    children_of = staticmethod(children_of)

    def __init__(self, distlaunch) -> None:
        self.launcher = distlaunch
        self.work: Path = distlaunch.work

    def start(
        self,
        program: str | Path,
        *args: str | os.PathLike[str],
        procs: int = 2,
        options: Sequence[str] = (),
        preexec: Callable[[], None] | None = None,
        **popen: Any,
    ):
        words = [
            "train",
            "--num-procs",
            str(procs),
            "--format",
            "plain",
            *options,
            self.program(program),
            *args,
        ]
        return self.launcher.start(words, preexec_fn=preexec, **popen)

    def run(
        self,
        program: str | Path,
        *args: str | os.PathLike[str],
        timeout: float = 60.0,
        **kwargs: Any,
    ):
        return self.start(program, *args, **kwargs).wait(timeout)

    @staticmethod
    def program(name: str | Path) -> str | Path:
        return PROGRAMS / name if isinstance(name, str) and name.endswith(".py") else name

    def await_signs(self, running, *names: str) -> None:
        """Wait until the programs have put up all of these signs. The launcher must not end
        before."""
        running.wait_for(
            lambda: all(map(self.has_sign, names)), f"signs {names}, only {self.signs()}"
        )

    def await_ready(self, running, procs: int = 2) -> list[int]:
        """Wait for all workers' ``ready-<rank>``. Return their pids."""
        names = [f"ready-{rank}" for rank in range(procs)]
        self.await_signs(running, *names)
        return [int(self.sign(name)) for name in names]

    def sign(self, name: str) -> str:
        """Return the text of a sign, once it is there."""
        until(lambda: self.has_sign(name), f"sign {name}; there are {self.signs()}")
        return (self.work / name).read_text()

    def has_sign(self, name: str) -> bool:
        return (self.work / name).exists()

    def signs(self) -> list[str]:
        return sorted(name for name in os.listdir(self.work) if not name.startswith("."))

    def put_sign(self, name: str) -> None:
        (self.work / name).touch()

    def spawner_of(self, running) -> int:
        return until(lambda: spawner_below(running.pid), f"{SPAWNER} below the launcher")

    def watcher_of(self, running) -> int:
        return until(lambda: child_named(running.pid, WATCHER), f"child {WATCHER} of the launcher")

    def servers_of(self, running) -> list[int]:
        """Return the processes that workers are forked from."""
        found = []
        for pid in children_of(self.spawner_of(running)):
            try:
                name = Path(f"/proc/{pid}/comm").read_text().strip()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if name == SERVER:
                found.append(pid)
        return found

    def server_of(self, running) -> int:
        return until(lambda: self.servers_of(running), f"a child {SERVER} of the spawner")[0]


@pytest.fixture
def job(distlaunch):
    """Return a ``Job``, whose programs report by signs."""
    return Job(distlaunch)


@pytest.fixture
def warm(job):
    """Start jobs with ``--preload``; modules are written to the working directory."""

    def start(program, *args, modules="json", options: Sequence[str] = (), env=None, **kwargs: Any):
        env = {"PYTHONPATH": str(job.work), **(env or {})}
        return job.start(
            program, *args, options=["--preload", modules, *options], env=env, **kwargs
        )

    return start


@pytest.fixture
def module(job):
    """Write a module that can be preloaded."""

    def write(name: str, text: str) -> str:
        (job.work / f"{name}.py").write_text(textwrap.dedent(text))
        return name

    return write


@pytest.fixture
def shell_job(distlaunch):
    """Run the launcher as the foreground job of an interactive shell. Yield (shell's process,
    terminal's other side)."""
    import fcntl
    import pty
    import sys
    import termios
    import threading

    opened: list[int] = []
    shells: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []

    def start(*words: str | os.PathLike[str]) -> tuple[subprocess.Popen[bytes], int]:
        master, slave = pty.openpty()
        opened.append(master)

        def own_the_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        shell = subprocess.Popen(
            [sys.executable, PROGRAMS / "shell.py", sys.executable, "-m", "distlaunch", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=distlaunch.work,
            env={**distlaunch.env, "TERM": "xterm"},
            start_new_session=True,
            preexec_fn=own_the_terminal,
        )
        os.close(slave)
        shells.append(shell)
        reader = threading.Thread(target=_read_all, args=(master,))
        reader.start()
        readers.append(reader)
        return shell, master

    yield start
    for shell in shells:
        if shell.poll() is None:
            job = distlaunch.work / "job"
            if job.exists():  # unreaped by its shell, so the pid is still its own
                os.kill(int(job.read_text()), signal.SIGKILL)
            shell.kill()
        shell.wait()
    for reader in readers:
        reader.join(10)
    for descriptor in opened:
        os.close(descriptor)


def _read_all(descriptor: int) -> None:
    """Read a terminal to its end, so that no writer has to wait."""
    try:
        while os.read(descriptor, 65536):
            pass
    except OSError:  # EIO: nobody has the other side open any more
        pass


@pytest.fixture
def batch(distlaunch, tmp_path):
    """Return the environment of a batch script on two nodes, with a fake srun that starts both
    here."""
    programs = tmp_path / "programs"
    programs.mkdir()
    shutil.copy(SRUN, programs / "srun")
    (distlaunch.work / "t.py").write_text(SLURM_WORKER)
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NNODES": "2",
        "SLURM_TASKS_PER_NODE": "1(x2)",
        "SLURMD_NODENAME": "n1",
        "SLURM_PROCID": "0",
        "SLURM_NODEID": "0",
    }
